# SPDX-License-Identifier: Apache-2.0
"""Who computes attention: one object for a model's life, asked once a step for that step's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tetrarch.attention.types import AttentionInputs
from tetrarch.core.registry import Registry
from tetrarch.kernels.attention import reference, tiled
from tetrarch.kernels.attention.reference import PagedBatch, ScoreRule

__all__ = [
    "BUILT",
    "REFERENCE",
    "ROW_INVARIANT",
    "AttentionBackend",
    "AttentionStep",
    "LargestStep",
    "TorchAttention",
]

# Those that are built for one model, with memory of their own.
BUILT = Registry({"triton": "tetrarch.attention.triton:TritonAttention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """What a backend's buffers must hold, for a model's life."""

    num_seqs: int
    short_q_len: int  # rows of a sequence that decodes, drafts included
    context_len: int


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

    def per_head(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply each head's rows by its own matrix: (T, H, n), (H, n, m) -> (T, H, m)."""
        ...


class AttentionBackend(Protocol):
    """Plans steps."""

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> AttentionStep:
        """Work out what every layer of one step needs."""
        ...

    def cuts(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Whether buffers hold the spans of these short sequences; captured steps rely on it."""
        ...


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Torch calls, on every device; `kernels/attention/reference.py` says what each part takes."""

    paged: Callable[[Tensor, Tensor, Tensor, PagedBatch, ScoreRule], Tensor]
    latent: Callable[[Tensor, Tensor, Tensor, Tensor, PagedBatch, ScoreRule], Tensor]
    per_head: Callable[[Tensor, Tensor], Tensor]

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> _TorchStep:
        """Work out what every layer of one step needs."""
        batch = reference.plan_batch(
            inputs.page_table,
            write_at=inputs.write_at,
            q_lens=inputs.q_lens,
            kv_lens=inputs.kv_lens_host,
            page_size=page_size,
        )
        return _TorchStep(self, batch)

    def cuts(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:  # noqa: ARG002
        """Buffers there are none, so that none is too small."""
        return True


REFERENCE = TorchAttention(
    reference.paged_attention, reference.paged_latent_attention, reference.per_head
)
# A row's bits depend on its own query and keys alone.
ROW_INVARIANT = TorchAttention(tiled.paged_attention, tiled.paged_latent_attention, tiled.per_head)


@dataclass(frozen=True, slots=True)
class _TorchStep:
    by: TorchAttention
    batch: PagedBatch

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        reference.write_(keys, key, self.batch)
        reference.write_(values, value, self.batch)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        return self.by.paged(query, keys, values, self.batch, rule)

    def attend_latent(
        self, query: tuple[Tensor, Tensor], latents: Tensor, rotaries: Tensor, rule: ScoreRule
    ) -> Tensor:
        return self.by.latent(*query, latents, rotaries, self.batch, rule)

    def per_head(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.by.per_head(rows, weight)
