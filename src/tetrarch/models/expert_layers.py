# SPDX-License-Identifier: Apache-2.0
"""Our expert layers take the place of a skeleton's."""

from __future__ import annotations

import torch

from tetrarch.config.plan import Plan
from tetrarch.memory.arena import Arena
from tetrarch.memory.slots import SlotTable
from tetrarch.models.skeleton import ExpertSite, Skeleton, swap_module
from tetrarch.moe.build import build_layer
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import ExpertSpec

__all__ = ["swap_experts"]


def swap_experts(
    skeleton: Skeleton,
    plan: Plan,
    *,
    device: torch.device,
    ignored: frozenset[str],
    scratch: SlotTable,
    arena: Arena | None,
) -> dict[str, MoELayer]:
    """Put our expert layers in the place of theirs."""
    layers: dict[str, MoELayer] = {}
    for site in skeleton.experts:
        layers[site.path] = build_layer(
            _expert_spec(site, dtype=skeleton.model.dtype, device=device),
            plan.experts,
            plan.quant.at(site.path),
            scratch=scratch,
            ignored=site.path in ignored,
            arena=arena,
        )
        swap_module(skeleton.model, site.path, layers[site.path])
    return layers


def _expert_spec(site: ExpertSite, *, dtype: torch.dtype, device: torch.device) -> ExpertSpec:
    return ExpertSpec(
        num_experts=site.shape.num_experts,
        num_local_experts=site.shape.num_experts,
        first_local_expert=0,
        top_k=site.top_k,
        hidden_size=site.shape.hidden_size,
        intermediate_size=site.shape.intermediate_size,
        activation=site.shape.activation,
        has_bias=site.shape.has_bias,
        dtype=dtype,
        device=device,
    )
