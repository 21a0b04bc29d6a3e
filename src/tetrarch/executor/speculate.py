# SPDX-License-Identifier: Apache-2.0
"""The draft's share of a step: it reads along, then guesses what comes next.

Entry i of the draft is made of the target's hidden state at position i and of token i + 1, and
lives in slot i of the sequence's own pages. Once a step's tokens are drawn, all its rows have a
token that follows, so one pass fills them in; entries behind a draft that was wrong are written
over by the next step. Every further pass takes one token of each sequence, the one just guessed,
with the draft's own hidden state in place of the target's.

Tokens and hidden states stay on the device until the last guess is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.executor.batch import ForwardBatch, page_table, place
from tetrarch.executor.step import SeqChunk, SeqResult, Step, StepResult
from tetrarch.models.build import Forward

__all__ = ["Draft", "with_drafts"]


class Draft(Protocol):
    """The part of `models.build.Model` that drafts."""

    def draft_forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
    ) -> Forward:
        """Compute one step of the draft."""
        ...


@dataclass(frozen=True, slots=True)
class _Reader:
    """A sequence that the draft works for."""

    index: int  # in the step
    chunk: SeqChunk
    next_ids: tuple[int, ...]  # of each row; behind a wrong draft they do not matter
    last: int  # the row whose next token is the last known
    num_drafts: int


@dataclass(frozen=True, slots=True)
class _Front:
    """The last guess of R sequences, and what the next one needs."""

    readers: tuple[_Reader, ...]
    tokens: Tensor  # (R,) int64
    hidden: Tensor  # (R, H), the draft's own
    table: NDArray[np.int32]  # (R, P)
    positions: NDArray[np.int64]  # (R,), of the entries to make next

    def without_those_that_have(self, num_drafts: int) -> _Front:
        """Leave out who wants no more than so many."""
        rows = [row for row, one in enumerate(self.readers) if one.num_drafts > num_drafts]
        if len(rows) == len(self.readers):
            return self
        at = torch.tensor(rows, device=self.tokens.device)
        return _Front(
            readers=tuple(self.readers[row] for row in rows),
            tokens=self.tokens[at],
            hidden=self.hidden[at],
            table=self.table[rows],
            positions=self.positions[rows],
        )


def with_drafts(
    draft: Draft,
    pool: KVPool,
    *,
    step: Step,
    result: StepResult,
    batch: ForwardBatch,
    hidden: Tensor,
) -> StepResult:
    """Let the draft do what the step's sequences want of it.

    Args:
        draft: What guesses.
        pool: Holds its entries beside the target's.
        step: What the target has computed.
        result: What came of it.
        batch: How it was laid out.
        hidden: (T, H) of the target, after its final norm.

    Returns:
        `result` with proposals: as many as wanted, or as the sequence's pages have slots for.
    """
    readers = [
        _reader(index, chunk, outcome, pool.page_size)
        for index, (chunk, outcome) in enumerate(zip(step.seqs, result.seqs, strict=True))
        if chunk.draft is not None and not outcome.failed
    ]
    if not readers:
        return result
    front = _read_along(draft, pool, readers, batch=batch, hidden=hidden)
    fronts = [front]
    for num_drafts in range(1, max(reader.num_drafts for reader in readers)):
        front = _guess(draft, pool, front.without_those_that_have(num_drafts))
        fronts.append(front)
    guesses = iter(torch.cat([front.tokens for front in fronts]).tolist())
    proposals: defaultdict[int, list[int]] = defaultdict(list)
    for front in fronts:
        for reader in front.readers:
            proposals[reader.index].append(next(guesses))
    return StepResult(
        tuple(
            structs.replace(outcome, drafts=tuple(proposals[index]))
            if index in proposals
            else outcome
            for index, outcome in enumerate(result.seqs)
        )
    )


def _reader(index: int, chunk: SeqChunk, outcome: SeqResult, page_size: int) -> _Reader:
    assert chunk.draft is not None
    ids, next_id = chunk.token_ids, chunk.draft.next_id
    last = len(ids) - 1
    if next_id is None:
        last -= len(chunk.samples) - len(outcome.token_ids)
        next_id = outcome.token_ids[-1]
    slots = len(chunk.pages) * page_size - chunk.start - last
    return _Reader(
        index=index,
        chunk=chunk,
        next_ids=(*ids[1 : last + 1], next_id, *ids[last + 1 :]),
        last=last,
        num_drafts=min(chunk.draft.num_drafts, slots),
    )


def _read_along(
    draft: Draft,
    pool: KVPool,
    readers: Sequence[_Reader],
    *,
    batch: ForwardBatch,
    hidden: Tensor,
) -> _Front:
    """Make the entries of all rows, and the first guess for those who want some."""
    device = hidden.device
    firsts = list(accumulate(batch.attn.q_lens, initial=0))
    lens = [len(reader.chunk.token_ids) for reader in readers]
    positions, attn = batch.positions, batch.attn
    if len(readers) < len(attn.q_lens):
        rows = [row for one in readers for row in range(firsts[one.index], firsts[one.index + 1])]
        hidden = hidden[torch.tensor(rows, device=device)]
        firsts = list(accumulate(lens, initial=0))
        positions, attn = place(
            page_table([reader.chunk.pages for reader in readers]),
            starts=np.array([reader.chunk.start for reader in readers], np.int64),
            q_lens=lens,
            page_size=pool.page_size,
            device=device,
        )
    ids = torch.tensor([i for reader in readers for i in reader.next_ids], device=device)
    guessing = [row for row, reader in enumerate(readers) if reader.num_drafts > 0]
    ends = [firsts[row] + readers[row].last for row in guessing]
    at = torch.tensor(ends, dtype=torch.int64, device=device)
    forward = draft.draft_forward(ids, hidden, positions, attn, pool, at)
    assert forward.hidden is not None
    some = tuple(readers[row] for row in guessing)
    return _Front(
        readers=some,
        tokens=forward.logits.argmax(dim=-1),
        hidden=forward.hidden[at],
        table=page_table([reader.chunk.pages for reader in some]),
        positions=np.array([one.chunk.start + one.last + 1 for one in some], np.int64),
    )


def _guess(draft: Draft, pool: KVPool, front: _Front) -> _Front:
    """Make one more entry for each sequence, of its last guess, and guess again."""
    device = front.tokens.device
    num_seqs = len(front.readers)
    positions, attn = place(
        front.table,
        starts=front.positions,
        q_lens=[1] * num_seqs,
        page_size=pool.page_size,
        device=device,
    )
    every = torch.arange(num_seqs, device=device)
    forward = draft.draft_forward(front.tokens, front.hidden, positions, attn, pool, every)
    assert forward.hidden is not None
    return replace(
        front,
        tokens=forward.logits.argmax(dim=-1),
        hidden=forward.hidden,
        positions=front.positions + 1,
    )
