# SPDX-License-Identifier: Apache-2.0
"""Step → ForwardBatch: the host's integers, laid out once as the tensors a forward reads.

Everything is assembled in numpy, and crosses to the device in one transfer: sixteen small copies
would take longer than a decode layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tetrarch.attention.types import AttentionInputs
from tetrarch.config.plan import TokenBudget
from tetrarch.core.errors import CapacityExceeded
from tetrarch.core.units import ceil_div
from tetrarch.executor.rows import RowMemory
from tetrarch.executor.step import FUTURE, SeqChunk, Step
from tetrarch.executor.transfer import upload

__all__ = ["ForwardBatch", "build_batch", "page_table", "place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward, on the device. T tokens of the flattened batch, L rows of logits."""

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    attn: AttentionInputs
    logits_at: Tensor  # (L,) int64, rows of the batch; drawn ones first, then scored ones
    drawn: Tensor  # (N,) int64, the executor's row of each one that draws
    num_tokens: int
    rank_tokens: tuple[int, ...]  # tokens of every data-parallel rank


def build_batch(
    step: Step, *, page_size: int, budget: TokenBudget, memory: RowMemory
) -> ForwardBatch:
    """Lay out a step's sequences one after the other; one transfer brings them to the device.

    `logits_at` lists the rows that every sequence draws from, in step order, then the scored
    rows of every sequence with `scoring`, in step order.

    Args:
        step: What to lay out.
        page_size: Positions in a page.
        budget: What buffers were sized for.
        memory: Of the rows, and on the device where the tensors shall be.

    Raises:
        CapacityExceeded: The step holds more tokens than the buffers were sized for, or a
            sequence has too few pages for its tokens.
    """
    _check_budget(step, budget)
    seqs = step.seqs
    _check_pages(seqs, page_size)
    places = _seq_places(seqs, memory.page_table(seqs), page_size=page_size)
    token_ids = np.fromiter(
        chain.from_iterable(seq.token_ids for seq in seqs), np.int64, step.num_tokens
    )
    ids, logits_at, drawn, unknown, rows, *there = upload(
        memory.device,
        token_ids,
        _logits_at(seqs, places.cu_seqlens_q.tolist()),
        np.array([seq.row for seq in seqs for _ in seq.samples], np.int64),
        np.flatnonzero(token_ids == FUTURE),
        np.array([seq.row for seq in seqs if seq.token_ids[-1] == FUTURE], np.int64),
        *places.arrays,
    )
    if len(rows):
        ids[unknown] = memory.last_ids[rows]
    positions, attn = places.tensors(there)
    return ForwardBatch(
        token_ids=ids,
        positions=positions,
        attn=attn,
        logits_at=logits_at,
        drawn=drawn,
        num_tokens=step.num_tokens,
        rank_tokens=step.rank_tokens,
    )


def page_table(pages: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the pages of R sequences as rows: (R, P), padded with 0."""
    table = np.zeros((len(pages), max(map(len, pages), default=0)), np.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    return table


def place(
    table: NDArray[np.int32],
    *,
    starts: NDArray[np.int64],
    q_lens: Sequence[int],
    page_size: int,
    device: torch.device,
) -> tuple[Tensor, AttentionInputs]:
    """Lay out the rows of R sequences: their positions (T,), and where their keys go.

    Args:
        table: (R, P), pages that hold all positions.
        starts: (R,), position of each sequence's first row.
        q_lens: Rows of each sequence, R of them.
        page_size: Positions in a page.
        device: Where the tensors shall be.
    """
    places = _places(table, starts=starts, q_lens=q_lens, page_size=page_size)
    return places.tensors(upload(device, *places.arrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """The fields of positions and `AttentionInputs`, on the host."""

    positions: NDArray[np.int64]
    write_at: NDArray[np.int64]
    cu_seqlens_q: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]
    q_lens: tuple[int, ...]

    @property
    def arrays(self) -> tuple[NDArray[np.int64] | NDArray[np.int32], ...]:
        """What the device needs."""
        return self.positions, self.write_at, self.cu_seqlens_q, self.kv_lens, self.page_table

    def tensors(self, there: Sequence[Tensor]) -> tuple[Tensor, AttentionInputs]:
        """Return the positions and the rest, of the arrays once they are on the device."""
        positions, write_at, cu_seqlens_q, kv_lens, table = there
        return positions, AttentionInputs(
            write_at=write_at,
            cu_seqlens_q=cu_seqlens_q,
            kv_lens=kv_lens,
            page_table=table,
            q_lens=self.q_lens,
            kv_lens_host=tuple(self.kv_lens.tolist()),
        )


def _seq_places(seqs: Sequence[SeqChunk], table: NDArray[np.int32], *, page_size: int) -> _Places:
    return _places(
        table,
        starts=np.array([seq.start for seq in seqs], np.int64),
        q_lens=[len(seq.token_ids) for seq in seqs],
        page_size=page_size,
    )


def _places(
    table: NDArray[np.int32],
    *,
    starts: NDArray[np.int64],
    q_lens: Sequence[int],
    page_size: int,
) -> _Places:
    cu_seqlens = np.zeros(len(q_lens) + 1, np.int32)
    np.cumsum(q_lens, out=cu_seqlens[1:])
    kv_lens = starts + np.array(q_lens, np.int64)
    positions = np.arange(cu_seqlens[-1]) + np.repeat(starts - cu_seqlens[:-1], q_lens)
    pages = table[np.repeat(np.arange(len(q_lens)), q_lens), positions // page_size]
    return _Places(
        positions=positions,
        write_at=pages.astype(np.int64) * page_size + positions % page_size,
        cu_seqlens_q=cu_seqlens,
        kv_lens=kv_lens.astype(np.int32),
        page_table=table,
        q_lens=tuple(q_lens),
    )


def _check_budget(step: Step, budget: TokenBudget) -> None:
    if (num_tokens := step.num_tokens) > budget.per_rank:
        raise CapacityExceeded(
            f"a step of {num_tokens} tokens, buffers for {budget.per_rank}",
            why=f"every buffer was sized by this term: {budget.term}",
            fix="this is a scheduling bug: admission must respect the token budget; report it",
        )


def _check_pages(seqs: Sequence[SeqChunk], page_size: int) -> None:
    for seq in seqs:
        end = seq.start + len(seq.token_ids)
        if (need := ceil_div(end, page_size)) > len(seq.pages):
            raise CapacityExceeded(
                f"row {seq.row} needs {need} pages and holds {len(seq.pages)}",
                why=f"it ends at position {end} with {page_size} positions a page",
                fix="this is a scheduling bug: pages are allocated before the step; report it",
            )


def _logits_at(seqs: Sequence[SeqChunk], ends: Sequence[int]) -> NDArray[np.int64]:
    rows: list[int] = []
    for end, seq in zip(ends[1:], seqs, strict=True):
        rows.extend(range(end - len(seq.samples), end))
    for index, seq in enumerate(seqs):
        if (scoring := seq.scoring) is not None:
            first = ends[index] + scoring.first
            rows.extend(range(first, first + len(scoring.targets)))
    return np.array(rows, np.int64)
