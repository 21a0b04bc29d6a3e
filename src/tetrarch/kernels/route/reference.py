# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to: the definition, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RouteRule", "route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """How a router's logits become experts and weights."""

    top_k: int
    score: str  # "softmax" over all experts, or "sigmoid" of each
    renormalise: bool  # the chosen ones' weights sum to one
    epsilon: float = 0.0  # added to the sum that they are divided by
    scale: float = 1.0  # of the weights, at the end
    round_to: torch.dtype = torch.float32  # of the weights


def route(logits: Tensor, rule: RouteRule, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: (T, E).
        rule: How.
        bias: (E,), added to scores for the choice alone.

    Returns:
        topk_ids: (T, K) int32, the larger score first, the lower expert among equals.
        topk_weights: (T, K) fp32.
    """
    wide = logits.float()
    scores = wide.sigmoid() if rule.score == "sigmoid" else wide.softmax(-1)
    for_choice = scores if bias is None else scores + bias.float()
    order = for_choice.sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, : rule.top_k]
    weights = scores.gather(1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    return ids.int(), (weights * rule.scale).to(rule.round_to).float()
