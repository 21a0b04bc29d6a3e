# SPDX-License-Identifier: Apache-2.0
"""Who computes attention: one object for a model's life, asked once a step for that step's plan.

reference   torch calls, on every device
triton      our Triton kernels (attention/triton.py)
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tetrarch.attention.types import AttentionInputs
from tetrarch.core.registry import Registry
from tetrarch.kernels.attention import reference
from tetrarch.kernels.attention.reference import ScoreRule

__all__ = ["BACKENDS", "REFERENCE", "AttentionBackend", "AttentionStep"]

BACKENDS = Registry(
    {
        "reference": "tetrarch.attention.backends:ReferenceAttention",
        "triton": "tetrarch.attention.triton:TritonAttention",
    }
)


class AttentionStep(Protocol):
    """One step, worked out for the layers. Shapes as in kernels/attention/reference.py."""

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Write a layer's new keys and values to its pages."""
        ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        """Attend to a layer's pages: (T, H, D) -> (T, H, Dv)."""
        ...

    def attend_latent(
        self, query: tuple[Tensor, Tensor], latents: Tensor, rotaries: Tensor, rule: ScoreRule
    ) -> Tensor:
        """Attend in MLA's latent space: (T, H, r) and (T, H, d) -> (T, H, r)."""
        ...


class AttentionBackend(Protocol):
    """Plans steps."""

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> AttentionStep:
        """Work out what every layer of one step needs."""
        ...


class ReferenceAttention:
    """The definition; needs no memory of its own."""

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> _ReferenceStep:
        """Work out what every layer of one step needs."""
        batch = reference.plan_batch(
            inputs.page_table,
            write_at=inputs.write_at,
            q_lens=inputs.q_lens,
            kv_lens=inputs.kv_lens_host,
            page_size=page_size,
        )
        return _ReferenceStep(batch)


REFERENCE = ReferenceAttention()


class _ReferenceStep:
    def __init__(self, batch: reference.PagedBatch) -> None:
        self._batch = batch

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        reference.write_(keys, key, self._batch)
        reference.write_(values, value, self._batch)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        return reference.paged_attention(query, keys, values, self._batch, rule)

    def attend_latent(
        self, query: tuple[Tensor, Tensor], latents: Tensor, rotaries: Tensor, rule: ScoreRule
    ) -> Tensor:
        return reference.paged_latent_attention(*query, latents, rotaries, self._batch, rule)
