# SPDX-License-Identifier: Apache-2.0
"""Drafting pays where it can, and costs next to nothing where it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.config.plan import SpecPlan
from tetrarch.engine.adaptive import DraftLength, DraftLengths, best_length

Make = Callable[..., Any]
ADAPTIVE = SpecPlan("mtp", 3, 4, adaptive=True)


def generate(
    length: DraftLength, rng: random.Random, num_tokens: int, *, acceptance: float, cost: float
) -> float:
    """Return the time of an output in plain steps.

    A step makes its drafts for the next one: `cost` is split evenly between the pass of the
    draft and the row of the target.
    """
    seconds, made, drafts = 0.0, 0, 0
    while made < num_tokens:
        wanted = length.current
        right = 0
        while right < drafts and rng.random() < acceptance:
            right += 1
        seconds += 1 + cost / 2 * drafts + cost / 2 * wanted
        made += right + 1
        length.observe(proposed=drafts, accepted=right)
        drafts = wanted
    return seconds


def speed(acceptance: float, *, num_tokens: int, num_requests: int, cost: float = 0.35) -> float:
    """Tokens a second over many requests, one after the other; plain steps yield 1."""
    lengths, rng = DraftLengths(ADAPTIVE), random.Random(1)
    seconds = sum(
        generate(lengths.start(), rng, num_tokens, acceptance=acceptance, cost=cost)
        for _ in range(num_requests)
    )
    return num_requests * num_tokens / seconds


def ideal(acceptance: float, cost: float = 0.35) -> float:
    """The best fixed length's."""
    tokens = [sum(acceptance**i for i in range(k + 1)) for k in range(4)]
    return max(count / (1 + cost * k) for k, count in enumerate(tokens))


@pytest.mark.parametrize("cost", [0.1, 0.35, 0.5])
@pytest.mark.parametrize(
    ("num_tokens", "num_requests"), [(200, 1), (20, 40), (50, 40), (5000, 1), (200, 50)]
)
def test_text_that_cannot_be_predicted_is_at_most_three_percent_slower(
    num_tokens: int, num_requests: int, cost: float
) -> None:
    got = speed(0.0, num_tokens=num_tokens, num_requests=num_requests, cost=cost)
    assert 0.97 <= got < 1


@pytest.mark.parametrize("acceptance", [0.8, 0.9, 0.95, 1.0])
def test_text_that_can_be_predicted_is_nearly_as_fast_as_it_could_be(acceptance: float) -> None:
    assert speed(acceptance, num_tokens=300, num_requests=20) > 0.97 * ideal(acceptance)


@pytest.mark.parametrize("acceptance", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
def test_in_between_it_is_never_much_slower_than_the_best(acceptance: float) -> None:
    assert speed(acceptance, num_tokens=300, num_requests=20) > 0.9 * ideal(acceptance)


def test_a_fixed_length_would_be_slow_there() -> None:
    """Negative control for the simulation."""
    fixed = DraftLengths(SpecPlan("mtp", 3, 4)).start()
    seconds = generate(fixed, random.Random(1), 200, acceptance=0.0, cost=0.35)
    assert 200 / seconds < 0.5


def test_a_text_that_becomes_predictable_is_noticed_and_one_that_no_longer_is() -> None:
    lengths, rng = DraftLengths(ADAPTIVE), random.Random(1)
    length = lengths.start()
    for acceptance, expected in ((0.0, 0), (0.95, 3), (0.0, 0), (0.95, 3)):
        generate(length, rng, 1000, acceptance=acceptance, cost=0.35)
        if expected:
            assert length.current >= 2
        else:
            generate(length, rng, 5, acceptance=0.0, cost=0.35)
            assert length.current <= 1


def test_new_requests_start_from_what_the_others_have_found() -> None:
    lengths, rng = DraftLengths(ADAPTIVE), random.Random(1)
    assert lengths.current == 3
    generate(lengths.start(), rng, 500, acceptance=0.0, cost=0.35)
    assert lengths.current == 0
    started = [lengths.start().current for _ in range(32)]
    assert started == ([0] * 15 + [1]) * 2, "one in sixteen tries"
    for _ in range(200):
        generate(lengths.start(), rng, 60, acceptance=0.95, cost=0.35)
    assert lengths.current == 3


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_no_draft_is_longer_than_the_flag_however_well_it_goes(steps: int) -> None:
    """The budget counts the flag's tokens, so that nothing may exceed it."""
    length = DraftLengths(SpecPlan("mtp", steps, steps + 1, adaptive=True)).start()
    seen: set[int] = set()
    for acceptance in (0.99, 0.0, 0.99):
        for _ in range(500):
            seen.add(length.current)
            generate(length, random.Random(1), 5, acceptance=acceptance, cost=0.35)
    assert max(seen) == steps
    assert min(seen) == 0, "it adapts"


def test_without_adapting_the_length_is_what_was_asked_for() -> None:
    length = DraftLengths(SpecPlan("mtp", 3, 4)).start()
    for _ in range(50):
        length.observe(proposed=3, accepted=0)
    assert length.current == 3


@pytest.mark.parametrize(
    ("acceptance", "length"), [(0.0, 0), (0.3, 0), (0.5, 1), (0.7, 2), (0.95, 3), (0.99, 3)]
)
def test_the_best_length_weighs_tokens_against_time(acceptance: float, length: int) -> None:
    assert best_length(acceptance, 3, cost=0.36) == length


def test_where_drafts_are_wrong_the_draft_stops_reading_and_is_tried_again(
    make_bench: Make, make_draft: Make
) -> None:
    draft = make_draft(0)
    bench = make_bench(steps=3, adaptive=True, draft=draft, context=900, pages=300, chunk=0)
    request = bench.add("a", range(4, 10), max_new_tokens=400)
    bench.step(100)
    works = [step.seqs[0].draft for step in bench.executor.steps]
    assert works[0] is not None
    assert works[10:] == [None] * 90
    draft.num_right = 99
    bench.run()
    assert len(bench.executor.steps) < 240
    assert bench.tokens("a") == bench.expected(request)
