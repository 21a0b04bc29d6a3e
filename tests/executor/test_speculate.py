# SPDX-License-Identifier: Apache-2.0
"""The draft finds every token that it needs, and says what the model will say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tetrarch.config.plan import Plan
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import DraftWork, Phase, SampleSpec, SeqChunk, SeqResult, Step

GREEDY = SampleSpec(temperature=0.0)
PAGE = 4


@dataclass
class Stream:
    """A sequence as a scheduler would see it."""

    row: int
    tokens: list[int]
    num_prompt: int
    is_drafted: bool
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()

    def chunk(self, rng: random.Random, free: list[int], *, most: int) -> SeqChunk:
        left = len(self.tokens) - self.computed
        end = self.computed + (left if left == 1 else rng.randint(1, min(left, most)))
        draws = end == len(self.tokens)
        drafts = self.drafts if draws else ()
        work = None
        if self.is_drafted:
            work = DraftWork(
                next_id=None if draws else self.tokens[end],
                num_drafts=rng.randint(0, 4) if draws else 0,
            )
        slots = end + len(drafts) + (rng.randint(0, 4) if work else 0)
        while len(self.pages) * PAGE < slots:
            self.pages.append(free.pop())
        return SeqChunk(
            row=self.row,
            token_ids=(*self.tokens[self.computed : end], *drafts),
            start=self.computed,
            pages=tuple(self.pages),
            samples=(GREEDY,) * (len(drafts) + 1) if draws else (),
            draft=work,
        )

    def take(self, chunk: SeqChunk, result: SeqResult) -> None:
        self.computed += len(chunk.token_ids) - len(chunk.samples) + len(result.token_ids)
        self.tokens += result.token_ids
        self.drafts = result.drafts


def spoil(drafts: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Make one of them wrong, sometimes."""
    if not drafts or rng.random() < 0.5:
        return drafts
    at = rng.randrange(len(drafts))
    return (*drafts[:at], (drafts[at] + 1) % 97, *drafts[at + 1 :])


def room_behind(chunk: SeqChunk, result: SeqResult) -> int:
    """Guesses that the pages have slots for; the last one needs none."""
    known = chunk.start + len(chunk.token_ids) - len(chunk.samples) + len(result.token_ids)
    return len(chunk.pages) * PAGE - known + 1


@pytest.mark.parametrize("seed", range(25))
def test_guesses_come_true_whatever_else_is_in_the_step(
    executor: Executor, history_model: Any, seed: int
) -> None:
    """Prompts in chunks, decodes, drafts of which some are wrong, sequences without a draft."""
    rng = random.Random(seed)
    free = rng.sample(range(64), 64)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 14))] for _ in range(4)]
    streams = [
        Stream(row, list(prompt), len(prompt), is_drafted=rng.random() < 0.8)
        for row, prompt in enumerate(prompts)
    ]
    for _ in range(12):
        active = [stream for stream in streams if rng.random() < 0.8] or streams
        chunks = [stream.chunk(rng, free, most=5) for stream in active]
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        step = Step(phase=Phase.PREFILL, seqs=tuple(chunks), rank_tokens=(num_tokens,))
        for stream, chunk, result in zip(active, chunks, executor.step(step).seqs, strict=True):
            stream.take(chunk, result)
            wanted = chunk.draft.num_drafts if chunk.draft else 0
            assert len(result.drafts) == min(wanted, room_behind(chunk, result))
            ahead = list(stream.tokens)
            for guess in result.drafts:
                assert guess == history_model.next_token(ahead)
                ahead.append(guess)
            stream.drafts = spoil(result.drafts, rng)
    for stream in streams:
        for end in range(stream.num_prompt, len(stream.tokens)):
            assert stream.tokens[end] == history_model.next_token(stream.tokens[:end])


def test_each_sequence_costs_one_row_a_guess_and_drops_out_when_it_has_enough(
    executor: Executor, history_model: Any
) -> None:
    def chunk(row: int, num_tokens: int, work: DraftWork | None) -> SeqChunk:
        pages = (4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3)
        tokens = tuple(range(num_tokens))
        return SeqChunk(
            row=row, token_ids=tokens, start=0, pages=pages, samples=(GREEDY,), draft=work
        )

    works = [DraftWork(next_id=None, num_drafts=3), None, DraftWork(next_id=None, num_drafts=1)]
    seqs = tuple(chunk(row, row + 2, work) for row, work in enumerate(works))
    history_model.draft_forwards.clear()
    results = executor.step(Step(phase=Phase.PREFILL, seqs=seqs, rank_tokens=(9,))).seqs
    assert [len(result.drafts) for result in results] == [3, 0, 1]
    assert history_model.draft_forwards == [2 + 4, 1, 1]


def test_a_step_without_work_for_the_draft_costs_nothing(
    executor: Executor, history_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    forward = history_model.forward

    def watched(*args: Any, wants_hidden: bool) -> Any:
        asked.append(wants_hidden)
        return forward(*args, wants_hidden=wants_hidden)

    monkeypatch.setattr(history_model, "forward", watched)
    history_model.draft_forwards.clear()
    for work in (None, DraftWork(next_id=None, num_drafts=1)):
        seq = SeqChunk(row=0, token_ids=(1,), start=0, pages=(0,), samples=(GREEDY,), draft=work)
        executor.step(Step(phase=Phase.DECODE, seqs=(seq,), rank_tokens=(1,)))
    assert asked == [False, True]
    assert history_model.draft_forwards == [1]


def test_nothing_is_guessed_for_a_sequence_that_failed(
    executor: Executor, history_model: Any, make_plan: Callable[..., Plan]
) -> None:
    history_model.draft_forwards.clear()
    history_model.broken = True
    work = DraftWork(next_id=None, num_drafts=2)
    seq = SeqChunk(row=0, token_ids=(1,), start=0, pages=(0,), samples=(GREEDY,), draft=work)
    (result,) = executor.step(Step(phase=Phase.DECODE, seqs=(seq,), rank_tokens=(1,))).seqs
    assert (result.failed, result.drafts, history_model.draft_forwards) == (True, (), [])
