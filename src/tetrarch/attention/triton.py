# SPDX-License-Identifier: Apache-2.0
"""Attention by our Triton kernels; buffers are allocated once, by `TritonAttention.build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.kernels.attention import reference, triton
from tetrarch.kernels.attention.reference import ScoreRule
from tetrarch.kernels.attention.triton import SplitLimits
from tetrarch.memory.slots import SlotTable

__all__ = ["TritonAttention"]


class TritonAttention:
    """Plans steps for kernels/attention/triton.py.

    Args:
        limits: What the buffers hold.
        scratch: The buffers of `scratch_specs`.
    """

    def __init__(self, limits: SplitLimits, scratch: Mapping[str, Tensor]) -> None:
        self._limits, self._scratch = limits, scratch

    @classmethod
    def build(
        cls,
        sites: Sequence[AttentionSite],
        limits: SplitLimits,
        *,
        num_heads: int,
        device: torch.device,
        scratch: SlotTable,
    ) -> TritonAttention:
        """Allocate what a model's layers share.

        Args:
            sites: The model's attention layers.
            limits: What the buffers must hold.
            num_heads: Query heads, of the layer that has most.
            device: Where the model is.
            scratch: Gets the buffers.
        """
        out_dim = max(site.key_dim if site.latent else site.value_dim for site in sites)
        specs = triton.scratch_specs(limits, num_heads=num_heads, out_dim=out_dim, device=device)
        return cls(limits, {name: scratch.allocate(name, spec) for name, spec in specs.items()})

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> _TritonStep:
        """Take up a step.

        Raises:
            CapacityExceeded: The buffers were sized for less.
        """
        batch = triton.plan_batch(
            inputs.page_table,
            write_at=inputs.write_at,
            cu_seqlens_q=inputs.cu_seqlens_q,
            kv_lens=inputs.kv_lens,
            page_size=page_size,
            q_lens=inputs.q_lens,
            kv_lens_host=inputs.kv_lens_host,
            limits=self._limits,
            scratch=self._scratch,
        )
        return _TritonStep(batch)


class _TritonStep:
    def __init__(self, batch: triton.PagedBatch) -> None:
        self._batch = batch

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        triton.write_(keys, values, key, value, self._batch)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        return triton.paged_attention(query, keys, values, self._batch, rule)

    def attend_latent(
        self, query: tuple[Tensor, Tensor], latents: Tensor, rotaries: Tensor, rule: ScoreRule
    ) -> Tensor:
        return triton.paged_latent_attention(*query, latents, rotaries, self._batch, rule)

    def per_head(self, rows: Tensor, weight: Tensor) -> Tensor:
        return reference.per_head(rows, weight)
