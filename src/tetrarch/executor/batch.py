# SPDX-License-Identifier: Apache-2.0
"""Step → ForwardBatch: the host's integers, laid out once as the tensors a forward reads.

Everything is assembled in numpy and becomes one tensor per field: at 16 decoding sequences this
takes about 0.1 ms, where sixteen small torch operations would take longer than a decode layer.
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
from tetrarch.executor.step import SeqChunk, Step

__all__ = ["ForwardBatch", "build_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward, on the device. T tokens of the flattened batch, L rows of logits."""

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    attn: AttentionInputs
    logits_at: Tensor  # (L,) int64, rows of the batch; drawn ones first, then scored ones
    num_tokens: int
    rank_tokens: tuple[int, ...]  # tokens of every data-parallel rank


def build_batch(
    step: Step, *, page_size: int, budget: TokenBudget, device: torch.device
) -> ForwardBatch:
    """Lay out a step's sequences one after the other.

    `logits_at` lists the rows that every sequence draws from, in step order, then the scored
    rows of every sequence with `scoring`, in step order.

    Raises:
        CapacityExceeded: The step holds more tokens than the buffers were sized for, or a
            sequence has too few pages for its tokens.
    """
    if (num_tokens := step.num_tokens) > budget.per_rank:
        raise CapacityExceeded(
            f"a step of {num_tokens} tokens, buffers for {budget.per_rank}",
            why=f"every buffer was sized by this term: {budget.term}",
            fix="this is a scheduling bug: admission must respect the token budget; report it",
        )
    seqs = step.seqs
    q_lens = tuple(len(seq.token_ids) for seq in seqs)
    cu_seqlens = np.zeros(len(seqs) + 1, np.int32)
    np.cumsum(q_lens, out=cu_seqlens[1:])
    starts = np.array([seq.start for seq in seqs], np.int64)
    kv_lens = starts + np.array(q_lens, np.int64)
    page_table = _page_table(seqs, kv_lens, page_size)

    positions = np.arange(num_tokens) + np.repeat(starts - cu_seqlens[:-1], q_lens)
    pages = page_table[np.repeat(np.arange(len(seqs)), q_lens), positions // page_size]
    write_at = pages.astype(np.int64) * page_size + positions % page_size
    token_ids = np.fromiter(
        chain.from_iterable(seq.token_ids for seq in seqs), np.int64, num_tokens
    )

    return ForwardBatch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        attn=AttentionInputs(
            write_at=_tensor(write_at, device),
            cu_seqlens_q=_tensor(cu_seqlens, device),
            kv_lens=_tensor(kv_lens.astype(np.int32), device),
            page_table=_tensor(page_table, device),
            q_lens=q_lens,
            kv_lens_host=tuple(kv_lens.tolist()),
        ),
        logits_at=_tensor(_logits_at(seqs, cu_seqlens), device),
        num_tokens=num_tokens,
        rank_tokens=step.rank_tokens,
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _page_table(
    seqs: Sequence[SeqChunk], kv_lens: NDArray[np.int64], page_size: int
) -> NDArray[np.int32]:
    table = np.zeros((len(seqs), max(len(seq.pages) for seq in seqs)), np.int32)
    for index, seq in enumerate(seqs):
        if (need := ceil_div(int(kv_lens[index]), page_size)) > len(seq.pages):
            raise CapacityExceeded(
                f"row {seq.row} needs {need} pages and holds {len(seq.pages)}",
                why=f"it ends at position {kv_lens[index]} with {page_size} positions a page",
                fix="this is a scheduling bug: pages are allocated before the step; report it",
            )
        table[index, : len(seq.pages)] = seq.pages
    return table


def _logits_at(seqs: Sequence[SeqChunk], cu_seqlens: NDArray[np.int32]) -> NDArray[np.int64]:
    ends = cu_seqlens.tolist()
    rows: list[int] = []
    for end, seq in zip(ends[1:], seqs, strict=True):
        rows.extend(range(end - len(seq.samples), end))
    for index, seq in enumerate(seqs):
        if (scoring := seq.scoring) is not None:
            first = ends[index] + scoring.first
            rows.extend(range(first, first + len(scoring.targets)))
    return np.array(rows, np.int64)
