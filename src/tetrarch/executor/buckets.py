# SPDX-License-Identifier: Apache-2.0
"""Steps of any size in forwards of a few sizes: how a batch is laid out in a bucket.

A bucket has room for S sequences of Q rows each. A sequence that brings fewer rows is given
*fillers* in front, at positions that it has computed before; a bucket that is not full repeats the
shortest sequence. Both visit experts that the batch visits anyway, or nearly, and read nothing but
pages of running sequences. What they write goes to a spare page. Prompts of any lengths share a
bucket of rows; one more prompt, that lives in the spare page, takes what they leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tetrarch.config.budget import tokens_per_request
from tetrarch.config.plan import Plan
from tetrarch.core.units import ceil_div

__all__ = [
    "AnyBucket",
    "Bucket",
    "Layout",
    "PromptBucket",
    "buckets_of",
    "choose_bucket",
    "lay_out",
    "pages_per_seq",
]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The size of a captured forward."""

    num_seqs: int
    q_len: int  # rows of each

    @property
    def num_rows(self) -> int:
        """Tokens."""
        return self.num_seqs * self.q_len


@dataclass(frozen=True, slots=True, order=True)
class PromptBucket:
    """The size of a captured forward of prompts; one more takes the rows that they leave."""

    num_rows: int
    num_seqs: int  # the one that fills it included


AnyBucket = Bucket | PromptBucket


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


def buckets_of(plan: Plan) -> tuple[AnyBucket, ...]:
    """Return the sizes that a plan captures: of one row, of as many as are verified, of prompts."""
    lengths = sorted({1, tokens_per_request(plan.spec)})
    seqs = plan.schedule.max_running_requests + 1
    return (
        *(Bucket(size, q) for q in lengths for size in plan.graphs.decode_batches),
        *(PromptBucket(rows, seqs) for rows in plan.graphs.prefill_sizes),
    )


def pages_per_seq(plan: Plan) -> int:
    """Return the most pages of a sequence: of a whole context and drafts, or what fills prompts."""
    longest = plan.model.context_len + tokens_per_request(plan.spec)
    return ceil_div(max(longest, plan.graphs.max_prefill_tokens), plan.memory.page_size)


def choose_bucket(
    buckets: Iterable[AnyBucket], q_lens: Sequence[int], kv_lens: Sequence[int]
) -> AnyBucket | None:
    """Return the bucket of fewest rows that holds a batch; `None`: none does.

    Args:
        buckets: To choose from.
        q_lens: Rows of each sequence.
        kv_lens: Its length after the step; a sequence must have positions for its fillers.
    """
    count, rows = len(q_lens), sum(q_lens)
    shortest, most = min(kv_lens, default=0), max(q_lens, default=0)

    def holds(bucket: AnyBucket) -> bool:
        if isinstance(bucket, PromptBucket):
            return 0 < rows <= bucket.num_rows and count < bucket.num_seqs
        return most <= bucket.q_len <= shortest and count <= bucket.num_seqs

    fitting = filter(holds, buckets)
    return min(fitting, key=lambda one: (one.num_rows, one.num_seqs), default=None)


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
