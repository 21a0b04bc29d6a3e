# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step, and with how many tokens.

First come, first served: requests are admitted in order of arrival, and nobody overtakes. When
pages run out, the youngest running request is set back; it keeps its tokens and computes them
again later.

Drafts are verified and made with the pages that nobody needs in that step, and with fewer pages
there are fewer drafts: nobody is set back, and no newcomer waits, for the sake of a guess. What
they took is given back when the step has run, but for the drafts that were right.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass

from tetrarch.config.budget import prompt_allowance
from tetrarch.config.plan import SchedulePlan
from tetrarch.core.units import ceil_div
from tetrarch.engine.pages import PageKey, PagePool
from tetrarch.engine.sequence import Sequence
from tetrarch.executor.step import Phase, SeqChunk, SeqResult, Step, StepResult

__all__ = ["Batch", "Scheduler"]

_HEADROOM = 64
"""Output tokens for which a newcomer must find pages, for itself and for each running request.
Fewer admit more requests, and set them back more often: with 64 requests of 1300 tokens over
pages for 6, 64 takes a quarter fewer steps than 512, and computes a third more tokens."""

_Work = list[tuple[Sequence, int]]  # who, and how many tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """A step, and the sequences behind its chunks."""

    step: Step
    seqs: tuple[Sequence, ...]


class Scheduler:
    """Continuous batching over one page pool.

    Attributes:
        waiting, running: In order of arrival.
        num_retractions: How often a request was set back.
    """

    def __init__(self, plan: SchedulePlan, pool: PagePool) -> None:
        self._plan, self._pool = plan, pool
        self._mixes = plan.mixed_chunk and plan.chunk_tokens > 0
        self._free_rows = list(range(plan.max_running_requests))
        self._prefilled = False  # what the last step did
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_retractions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence by its order of arrival."""
        insort(self.waiting, seq, key=_order)

    def remove(self, seq: Sequence, *, is_bad: bool = False) -> None:
        """Let a sequence go, wherever it is.

        Args:
            seq: Waiting or running.
            is_bad: Its keys and values may be broken: nobody may find them in the cache.
        """
        if seq.row is None:
            self.waiting.remove(seq)
            return
        if is_bad:
            self._spoil(seq)
        self._stop(seq)

    def retract_all(self) -> None:
        """Set every running sequence back; they keep their tokens."""
        while self.running:
            self._retract(self.running[-1])

    def schedule(self) -> Batch | None:
        """Choose the next step, and give its tokens their pages; `None` without work.

        Running requests generate in every step where prompts and decodes mix, else in every
        second one at least.
        """
        work: _Work = []
        if self._mixes or self._prefilled:
            work = self._decodes()
        if self._mixes or not work:
            work += self._prefills(len(work))
        if not work:
            work = self._decodes()
        if not work:
            return None
        chunks = tuple(
            seq.chunk(count, num_drafts=self._reserve_drafts(seq, count)) for seq, count in work
        )
        phase = _phase(chunks)
        self._prefilled = phase is Phase.PREFILL
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        step = Step(phase=phase, seqs=chunks, rank_tokens=(num_tokens,))
        return Batch(step, tuple(seq for seq, _ in work))

    def commit(self, batch: Batch, result: StepResult) -> None:
        """Note that a step has run: its keys and values are in the pages.

        Those of drafts that were wrong are not: they will be written over.
        """
        for seq, chunk, outcome in zip(batch.seqs, batch.step.seqs, result.seqs, strict=True):
            seq.num_computed += len(chunk.token_ids) - _num_wrong(chunk, outcome)
            seq.drafts = outcome.drafts
            self._trim(seq)
            if seq.num_computed <= seq.num_prompt:
                self._learn(seq)

    def set_back(self, seq: Sequence, *, is_bad: bool = False) -> None:
        """Let a running sequence compute everything again.

        Args:
            seq: It keeps its tokens.
            is_bad: As for `remove`.
        """
        if is_bad:
            self._spoil(seq)
        self._retract(seq)

    def _decodes(self) -> _Work:
        """Everyone who has one token left; the oldest get their pages first."""
        for seq in [seq for seq in self.running if seq.num_left == 1]:
            while seq.row is not None and not self._extend(seq, 1):
                self._retract(self.running[-1])
        return [(seq, 1) for seq in self.running if seq.num_left == 1]

    def _prefills(self, num_decodes: int) -> _Work:
        """Prompts that go on, then prompts that begin, as far as tokens and pages allow."""
        partial = [seq for seq in self.running if seq.num_left > 1]
        head = next(iter(partial or self.waiting), None)
        if head is None:
            return []
        room = prompt_allowance(self._plan, num_decodes=num_decodes, head_tokens=head.num_left)
        work: _Work = []
        for seq in partial:
            count = min(seq.num_left, room, self._num_fitting(seq))
            if count > 0 and self._extend(seq, count):
                work.append((seq, count))
                room -= count
        self._admit(work, room)
        return work

    def _admit(self, work: _Work, room: int) -> None:
        """Start waiting sequences in order, until one does not fit."""
        computing = {self._next_page(seq, seq.pages[: seq.known]) for seq, _ in work}
        reserved = sum(self._growth(seq) for seq in self.running) if self.waiting else 0
        while self.waiting and self._free_rows and room > 0:
            seq = self.waiting[0]
            matched = self._match(seq)
            left = len(seq.tokens) - len(matched) * self._pool.page_size
            next_page = self._next_page(seq, matched)
            if next_page is not None and next_page in computing:
                return  # this step computes what it would compute: match it in the next one
            if left > room and not self._plan.chunk_tokens:
                return
            if self.running and not self._has_pages(seq, matched, reserved=reserved):
                return
            self._start(seq, matched)
            work.append((seq, min(left, room)))
            self._extend(seq, min(left, room))
            room -= min(left, room)
            reserved += self._growth(seq)
            computing.add(next_page)

    def _match(self, seq: Sequence) -> tuple[int, ...]:
        return self._pool.match(seq.tokens, seq.match_limit) if self._plan.prefix_cache else ()

    def _next_page(self, seq: Sequence, pages: tuple[int, ...]) -> PageKey | None:
        """Identify the page after `pages`; `None` where the cache may not give it to `seq`."""
        end = (len(pages) + 1) * self._pool.page_size
        if not self._plan.prefix_cache or end > seq.match_limit:
            return None
        return self._pool.next_key(seq.tokens, pages)

    def _has_pages(self, seq: Sequence, matched: tuple[int, ...], *, reserved: int) -> bool:
        need = self._growth(seq) - len(matched) + reserved
        return need <= self._pool.num_available - self._pool.num_cached_of(matched)

    def _growth(self, seq: Sequence) -> int:
        """Pages that a sequence will soon want beyond those it has."""
        soon = min(len(seq.tokens) + _HEADROOM, seq.limit)
        return seq.pages_for(soon, page_size=self._pool.page_size)

    def _num_fitting(self, seq: Sequence) -> int:
        """How many more tokens of a sequence the available pages hold."""
        pages = len(seq.pages) + self._pool.num_available
        return pages * self._pool.page_size - seq.num_computed

    def _extend(self, seq: Sequence, count: int) -> bool:
        """Give a sequence the pages for its next `count` tokens, if there are any."""
        need = seq.pages_for(seq.num_computed + count, page_size=self._pool.page_size)
        if need > self._pool.num_available:
            return False
        if need:
            seq.pages += self._pool.take(need)
        return True

    def _reserve_drafts(self, seq: Sequence, count: int) -> int:
        """Find pages for drafts to verify and for drafts to make; return how many to verify.

        The draft's own entries go one token less far than what it proposes. The executor proposes
        as many as the pages hold.
        """
        size, end = self._pool.page_size, seq.num_computed + count
        useful = seq.num_useful if end == len(seq.tokens) else 0
        ahead = useful + max(seq.num_wanted - 1, 0) if end == len(seq.tokens) else 0
        missing = seq.pages_for(min(end + ahead, seq.limit), page_size=size)
        seq.pages += self._pool.take(min(missing, self._pool.num_available))
        return min(useful, len(seq.pages) * size - end)

    def _trim(self, seq: Sequence) -> None:
        """Give back the pages behind what is computed."""
        used = ceil_div(seq.num_computed, self._pool.page_size)
        if used < len(seq.pages):
            self._pool.release(seq.pages[used:])
            seq.pages = seq.pages[:used]

    def _spoil(self, seq: Sequence) -> None:
        self._pool.forget(seq.pages)
        seq.num_computed = seq.known = 0

    def _start(self, seq: Sequence, matched: tuple[int, ...]) -> None:
        self._pool.hold(matched)
        seq.pages, seq.known = matched, len(matched)
        seq.num_computed = len(matched) * self._pool.page_size
        if seq.num_retractions == 0:
            seq.num_cached = seq.num_computed
        seq.row = heapq.heappop(self._free_rows)
        self.waiting.remove(seq)
        insort(self.running, seq, key=_order)

    def _stop(self, seq: Sequence) -> None:
        """Take a running sequence's row and pages; what it computed stays known."""
        assert seq.row is not None
        self._learn(seq)
        self._pool.release(seq.pages)
        heapq.heappush(self._free_rows, seq.row)
        seq.row, seq.pages, seq.known, seq.num_computed = None, (), 0, 0
        seq.drafts = ()
        self.running.remove(seq)

    def _learn(self, seq: Sequence) -> None:
        if self._plan.prefix_cache:
            computed = seq.tokens[: seq.num_computed]
            seq.pages = self._pool.learn(computed, seq.pages, known=seq.known)
            seq.known = len(computed) // self._pool.page_size

    def _retract(self, seq: Sequence) -> None:
        self._stop(seq)
        self.add(seq)
        seq.num_retractions += 1
        self.num_retractions += 1


def _order(seq: Sequence) -> int:
    return seq.order


def _phase(chunks: tuple[SeqChunk, ...]) -> Phase:
    if not all(_is_decode(chunk) for chunk in chunks):
        return Phase.PREFILL
    return Phase.VERIFY if any(chunk.drafts for chunk in chunks) else Phase.DECODE


def _is_decode(chunk: SeqChunk) -> bool:
    return len(chunk.token_ids) == len(chunk.samples) and chunk.scoring is None


def _num_wrong(chunk: SeqChunk, outcome: SeqResult) -> int:
    """Rows that compute nothing of the sequence: all behind the one that drew its last token."""
    return len(chunk.samples) - len(outcome.token_ids)
