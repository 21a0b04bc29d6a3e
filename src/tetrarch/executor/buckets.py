# SPDX-License-Identifier: Apache-2.0
"""Steps of any size in forwards of a few sizes: how a batch is laid out in a bucket.

A bucket has room for S sequences of Q rows each. A sequence that brings fewer rows is given
*fillers* in front, at positions that it has computed before; a bucket that is not full repeats the
shortest sequence. Both visit experts that the batch visits anyway, or nearly, and read nothing but
pages of running sequences. What they write goes to a spare page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tetrarch.config.budget import tokens_per_request
from tetrarch.config.plan import Plan
from tetrarch.core.units import ceil_div

__all__ = ["Bucket", "Layout", "buckets_of", "choose_bucket", "lay_out", "pages_per_seq"]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The size of a captured forward."""

    num_seqs: int
    q_len: int  # rows of each

    @property
    def num_rows(self) -> int:
        """Tokens."""
        return self.num_seqs * self.q_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which row and which sequence of a batch each one of a bucket is made of.

    Attributes:
        source: (S * Q,) row of the batch.
        back: (S * Q,) positions before that row's own.
        is_spare: (S * Q,) whether the row is there for the shape alone.
        seqs: (S,) sequence of the batch.
        row_of: (T,) where each row of the batch lies.
        is_even: Every sequence brings Q rows, so that the bucket begins with the batch.
    """

    source: NDArray[np.int64]
    back: NDArray[np.int64]
    is_spare: NDArray[np.bool_]
    seqs: NDArray[np.int64]
    row_of: NDArray[np.int64]
    is_even: bool


def buckets_of(plan: Plan) -> tuple[Bucket, ...]:
    """Return the sizes that a plan captures: of one row, and of as many as are verified."""
    lengths = sorted({1, tokens_per_request(plan.spec)})
    return tuple(Bucket(size, q) for q in lengths for size in plan.graphs.decode_batches)


def pages_per_seq(plan: Plan) -> int:
    """Return the most pages of a sequence: those of a whole context, and of drafts beyond."""
    longest = plan.model.context_len + tokens_per_request(plan.spec)
    return ceil_div(longest, plan.memory.page_size)


def choose_bucket(
    buckets: Sequence[Bucket], q_lens: Sequence[int], kv_lens: Sequence[int]
) -> Bucket | None:
    """Return the bucket of fewest rows that holds a batch; `None`: none does.

    Args:
        buckets: To choose from.
        q_lens: Rows of each sequence.
        kv_lens: Its length after the step; a sequence must have positions for its fillers.
    """
    shortest, most = min(kv_lens, default=0), max(q_lens, default=0)
    fitting = (
        bucket
        for bucket in buckets
        if most <= bucket.q_len <= shortest and len(q_lens) <= bucket.num_seqs
    )
    return min(fitting, key=lambda bucket: (bucket.num_rows, bucket), default=None)


def lay_out(bucket: Bucket, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Layout:
    """Lay out a batch in a bucket that holds it."""
    count, lens = len(q_lens), np.array(q_lens, np.int64)
    repeated = np.full(bucket.num_seqs - count, np.argmin(kv_lens))
    seqs = np.concatenate((np.arange(count), repeated))
    offset = np.arange(bucket.q_len) - (bucket.q_len - lens[seqs])[:, None]  # below 0: a filler
    source = (np.cumsum(lens) - lens)[seqs][:, None] + offset.clip(min=0)
    is_spare = (offset < 0) | (np.arange(bucket.num_seqs) >= count)[:, None]
    return Layout(
        source=source.reshape(-1),
        back=(-offset).clip(min=0).reshape(-1),
        is_spare=is_spare.reshape(-1),
        seqs=seqs,
        row_of=np.flatnonzero(~is_spare),
        is_even=bool((lens == bucket.q_len).all()),
    )
