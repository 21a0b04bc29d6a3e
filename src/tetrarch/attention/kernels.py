# SPDX-License-Identifier: Apache-2.0
"""Which functions compute attention; the plan chooses a row of this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tetrarch.kernels.attention import reference, tiled
from tetrarch.kernels.attention.reference import PagedBatch, ScoreRule

__all__ = ["ORDINARY", "ROW_INVARIANT", "AttentionKernels"]


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One way to compute it; `kernels/attention/reference.py` says what each part takes."""

    paged: Callable[[Tensor, Tensor, Tensor, PagedBatch, ScoreRule], Tensor]
    latent: Callable[[Tensor, Tensor, Tensor, Tensor, PagedBatch, ScoreRule], Tensor]
    per_head: Callable[[Tensor, Tensor], Tensor]


ORDINARY = AttentionKernels(
    reference.paged_attention, reference.paged_latent_attention, reference.per_head
)
# A row's bits depend on its own query and keys alone.
ROW_INVARIANT = AttentionKernels(
    tiled.paged_attention, tiled.paged_latent_attention, tiled.per_head
)
