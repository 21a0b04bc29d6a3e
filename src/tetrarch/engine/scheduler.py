# SPDX-License-Identifier: Apache-2.0
"""Who runs in the next step, and with how many tokens.

First come, first served: requests are admitted in order of arrival, and nobody overtakes. When
pages run out, the youngest running request is set back; it keeps its tokens and computes them
again later.

Drafts are verified and made with the pages that nobody needs in that step, and with fewer pages
there are fewer drafts: nobody is set back, and no newcomer waits, for the sake of a guess. What
they took is given back when the step has run, but for the drafts that were right.

A step may be scheduled while the one before is in flight: whoever generates then goes on from a
token that nobody has read yet, as if the step before ended nobody. Who proves to have ended has
a row too many in that step. Its result is dropped, and the pages stay out of reach until it is
through.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tetrarch.config.budget import prompt_allowance
from tetrarch.config.plan import SchedulePlan
from tetrarch.engine.holdings import Holdings
from tetrarch.engine.pages import PagePool
from tetrarch.engine.sequence import Sequence
from tetrarch.executor.step import Phase, SeqChunk, SeqResult, Step, StepResult

__all__ = ["Batch", "Landed", "Scheduler"]

_Work = list[tuple[Sequence, int]]  # who, and how many tokens
Landed = tuple[Sequence, SeqChunk, SeqResult]  # who, what it asked for, and what came of it


@dataclass(frozen=True, slots=True)
class Batch:
    """A step, and the sequences behind its chunks.

    Attributes:
        step, seqs: One chunk each.
        parked: Pages of sequences that have ended while it was in flight, for it may write there.
    """

    step: Step
    seqs: tuple[Sequence, ...]
    parked: list[int] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one page pool.

    Attributes:
        waiting, running: In order of arrival.
        num_retractions: How often a request was set back.
    """

    def __init__(self, plan: SchedulePlan, pool: PagePool) -> None:
        self._plan, self._pool = plan, pool
        self._holdings = Holdings(pool, prefix_cache=plan.prefix_cache)
        self._mixes = plan.mixed_chunk and plan.chunk_tokens > 0
        self._free_rows = list(range(plan.max_running_requests))
        self._prefilled = False  # what the last step did
        self._flying: deque[Batch] = deque()  # scheduled and not committed, oldest first
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
            self._holdings.spoil(seq)
        self._stop(seq)

    def retract_all(self) -> None:
        """Set every running sequence back; they keep their tokens."""
        while self.running:
            self._retract(self.running[-1])

    def schedule(self) -> Batch | None:
        """Choose the next step, and give its tokens their pages; the caller launches it.

        Running requests generate in every step where prompts and decodes mix, else in every
        second one at least.

        Returns:
            `None` without work, and where a step in flight decides what comes next.
        """
        if self._flying and self._must_wait():
            return None
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
            seq.chunk(count, num_drafts=self._holdings.reserve_drafts(seq, count))
            for seq, count in work
        )
        phase = _phase(chunks)
        self._prefilled = phase is Phase.PREFILL
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        step = Step(phase=phase, seqs=chunks, rank_tokens=(num_tokens,))
        batch = Batch(step, tuple(seq for seq, _ in work))
        for seq, chunk in zip(batch.seqs, chunks, strict=True):
            seq.launch(chunk)
        self._flying.append(batch)
        return batch

    def commit(self, result: StepResult) -> Iterable[Landed]:
        """Note that the oldest step in flight has run: its keys and values are in the pages.

        Those of drafts that were wrong are not: they will be written over.

        Returns:
            The chunks of those who still live.
        """
        batch = self._flying.popleft()
        self._pool.release(batch.parked)
        landed: list[Landed] = []
        for seq, chunk, outcome in zip(batch.seqs, batch.step.seqs, result.seqs, strict=True):
            if seq.row is None:
                continue
            seq.land(chunk, outcome)
            self._holdings.trim(seq)
            if not self._holdings.knows_prompt(seq):
                self._holdings.learn(seq)
            landed.append((seq, chunk, outcome))
        return landed

    def set_back(self, seq: Sequence, *, is_bad: bool = False) -> None:
        """Let a running sequence compute everything again.

        Args:
            seq: It keeps its tokens.
            is_bad: As for `remove`.
        """
        if is_bad:
            self._holdings.spoil(seq)
        self._retract(seq)

    def _must_wait(self) -> bool:
        """Whether the step in flight decides what the next one holds.

        It does for those whose next draw depends on which tokens came before, and where pages are
        short: who ends gives some back, and nobody is set back who might be about to end.
        """
        decodes = [seq for seq in self.running if seq.num_left == 1]
        if any(seq.num_future and seq.reads_outputs for seq in decodes):
            return True
        return not self._holdings.suffice(decodes)

    def _decodes(self) -> _Work:
        """Everyone who has one token left; the oldest get their pages first."""
        decodes = [seq for seq in self.running if seq.num_left == 1]
        for seq in decodes:
            while seq.row is not None and not self._holdings.extend(seq, 1):
                self._retract(self.running[-1])
        return [(seq, 1) for seq in decodes if seq.row is not None]

    def _prefills(self, num_decodes: int) -> _Work:
        """Prompts that go on, then prompts that begin, as far as tokens and pages allow."""
        partial = [seq for seq in self.running if seq.num_left > 1]
        head = next(iter(partial or self.waiting), None)
        if head is None:
            return []
        room = prompt_allowance(self._plan, num_decodes=num_decodes, head_tokens=head.num_left)
        work: _Work = []
        for seq in partial:
            count = min(seq.num_left, room, self._holdings.num_fitting(seq))
            if count > 0 and self._holdings.extend(seq, count):
                work.append((seq, count))
                room -= count
        if self.waiting:
            self._admit(work, room)
        return work

    def _admit(self, work: _Work, room: int) -> None:
        """Start waiting sequences in order, until one does not fit."""
        holdings = self._holdings
        computing = {
            holdings.next_page(seq, seq.pages[: seq.known])
            for seq in self.running
            if not holdings.knows_prompt(seq)
        }
        reserved = sum(holdings.growth(seq) for seq in self.running)
        while self.waiting and self._free_rows and room > 0:
            seq = self.waiting[0]
            matched = holdings.match(seq)
            left = seq.size - len(matched) * self._pool.page_size
            next_page = holdings.next_page(seq, matched)
            if next_page is not None and next_page in computing:
                return  # this step computes what it would compute: match it in the next one
            if left > room and not self._plan.chunk_tokens:
                return
            somebody = self.running or self._flying  # else all pages are available
            if somebody and not holdings.has_room(seq, matched, reserved=reserved):
                return
            self._start(seq, matched)
            work.append((seq, min(left, room)))
            holdings.extend(seq, min(left, room))
            room -= min(left, room)
            reserved += holdings.growth(seq)
            computing.add(next_page)

    def _start(self, seq: Sequence, matched: tuple[int, ...]) -> None:
        self._holdings.begin(seq, matched)
        if seq.num_retractions == 0:
            seq.num_cached = seq.num_computed
        seq.row = heapq.heappop(self._free_rows)
        self.waiting.remove(seq)
        insort(self.running, seq, key=_order)

    def _stop(self, seq: Sequence) -> None:
        """Take a running sequence's row and pages; what it computed stays known."""
        assert seq.row is not None
        self._holdings.learn(seq)
        if self._flying:
            self._flying[-1].parked.extend(seq.pages)
        else:
            self._pool.release(seq.pages)
        heapq.heappush(self._free_rows, seq.row)
        seq.stop()
        self.running.remove(seq)

    def _retract(self, seq: Sequence) -> None:
        assert not self._flying, "what is in flight may hold a token that would be lost"
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
