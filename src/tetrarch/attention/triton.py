# SPDX-License-Identifier: Apache-2.0
"""Attention by our Triton kernels; buffers are allocated once, by `TritonAttention.build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tetrarch.attention.backends import LargestStep
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.kernels.attention import reference, triton
from tetrarch.kernels.attention.reference import ScoreRule
from tetrarch.kernels.attention.triton import SplitLimits, limits_for, units_of
from tetrarch.kernels.matmul.triton import multiply_heads
from tetrarch.memory.slots import SlotTable

__all__ = ["TritonAttention"]

# For the spans' sums. With 32 heads of 128, 8192 tokens in each of 4096 sequences; those of
# longer sequences, if they are that many, need no spans to occupy a GPU.
_MOST_BYTES = 1 << 30


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
        largest: LargestStep,
        *,
        device: torch.device,
        scratch: SlotTable,
        invariant: bool = False,
    ) -> TritonAttention:
        """Allocate what a model's layers share, for the largest step of a model on a GPU.

        Args:
            sites: The model's attention layers.
            largest: What the buffers must hold.
            device: Where the model is.
            scratch: Gets the buffers.
            invariant: A row has the same bits however its prompt was chunked.
        """
        cuts = {"short_q_len": largest.short_q_len, "exact_prompts": invariant}
        limits = limits_for(device, num_seqs=largest.num_seqs, num_units=0, **cuts)
        lens = (largest.context_len,) * largest.num_seqs
        num_units = units_of((1,) * largest.num_seqs, lens, limits)
        num_bytes = 4 * largest.short_q_len * max(site.num_heads * _width(site) for site in sites)
        num_units = min(num_units, max(largest.num_seqs, _MOST_BYTES // num_bytes))
        return cls.of(sites, replace(limits, num_units=num_units), device=device, scratch=scratch)

    @classmethod
    def of(
        cls,
        sites: Sequence[AttentionSite],
        limits: SplitLimits,
        *,
        device: torch.device,
        scratch: SlotTable,
    ) -> TritonAttention:
        """Allocate what these limits need; as for `build`."""
        num_heads, out_dim = max(site.num_heads for site in sites), max(map(_width, sites))
        specs = triton.scratch_specs(limits, num_heads=num_heads, out_dim=out_dim, device=device)
        return cls(limits, {name: scratch.allocate(name, spec) for name, spec in specs.items()})

    def cuts(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Whether the spans of a step fit, so that its short sequences are cut."""
        return units_of(q_lens, kv_lens, self._limits) <= self._limits.num_units

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> _TritonStep:
        """Take up a step. Where its spans do not fit, every sequence is walked as a prompt is.

        Raises:
            CapacityExceeded: More sequences than the buffers were sized for.
        """
        is_cut = self.cuts(inputs.q_lens, inputs.kv_lens_host)
        limits = self._limits if is_cut else replace(self._limits, short_q_len=0)
        batch = triton.plan_batch(
            inputs.page_table,
            write_at=inputs.write_at,
            cu_seqlens_q=inputs.cu_seqlens_q,
            kv_lens=inputs.kv_lens,
            page_size=page_size,
            q_lens=inputs.q_lens,
            kv_lens_host=inputs.kv_lens_host,
            limits=limits,
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
        if self._batch.limits.exact_prompts:
            return multiply_heads(rows, weight)
        return reference.per_head(rows, weight)


def _width(site: AttentionSite) -> int:
    """Return the numbers of a head's output."""
    return site.key_dim if site.latent else site.value_dim
