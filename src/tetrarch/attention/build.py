# SPDX-License-Identifier: Apache-2.0
"""A plan becomes the one who computes attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tetrarch.attention.backends import (
    BUILT,
    REFERENCE,
    ROW_INVARIANT,
    AttentionBackend,
    LargestStep,
)
from tetrarch.attention.types import AttentionSite
from tetrarch.config.budget import tokens_per_request
from tetrarch.config.plan import Plan
from tetrarch.memory.slots import SlotTable

__all__ = ["build_attention", "largest_step"]


def build_attention(
    sites: Sequence[AttentionSite], plan: Plan, *, device: torch.device, scratch: SlotTable
) -> AttentionBackend:
    """Return who computes attention, with buffers for the largest step where it needs any.

    Built elsewhere than planned, as `tetrarch checksum` does, a model attends to nothing.

    Args:
        sites: The model's attention layers.
        plan: Who it is, and how many sequences of how many tokens there may be.
        device: Where the model is.
        scratch: Gets the buffers.
    """
    if plan.attention == "torch" or device.type != plan.device.torch_device:
        return ROW_INVARIANT if plan.deterministic else REFERENCE
    return BUILT[plan.attention].build(
        sites, largest_step(plan), device=device, scratch=scratch, invariant=plan.deterministic
    )


def largest_step(plan: Plan) -> LargestStep:
    """Return the sizes that no step exceeds."""
    prompts = plan.experts.budget.per_rank // plan.model.context_len + 1  # of a smoke step
    return LargestStep(
        num_seqs=max(plan.schedule.max_running_requests + 1, prompts),  # 1: fills a bucket
        short_q_len=tokens_per_request(plan.spec),
        context_len=plan.model.context_len,
    )
