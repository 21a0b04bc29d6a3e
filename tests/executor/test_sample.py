# SPDX-License-Identifier: Apache-2.0
"""Draws: the right distribution, and nothing but the row decides."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tetrarch.executor import sample as room
from tetrarch.executor.sample import uniforms
from tetrarch.executor.step import SampleSpec

LOGITS = [2.0, 0.5, 1.0, -1.0, 0.0, 3.0, -0.5, 1.5]
DRAWS = 6000

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all": {"temperature": 1.7, "top_k": 6, "top_p": 0.85, "min_p": 0.2},
    "bias": {"logit_bias": ((3, 4.0), (5, -2.0))},
    "penalised": {"output_ids": (5, 5, 0), "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "banned": {"banned_ids": (5, 0)},
}


def sample(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int | None]:
    """One id per row; `None` where it could not be drawn."""
    return [None if i < 0 else i for i in room.sample(logits, specs).tolist()]


def exact(spec: SampleSpec) -> list[float]:
    """The distribution a request asks for, in double precision, by the documented order."""
    logits = list(LOGITS)
    for token in set(spec.output_ids):
        p = spec.repetition_penalty
        logits[token] = logits[token] / p if logits[token] > 0 else logits[token] * p
        logits[token] -= spec.frequency_penalty * spec.output_ids.count(token)
    for token, bias in spec.logit_bias:
        logits[token] += bias
    weights = [math.exp(x / spec.temperature) for x in logits]
    for token in spec.banned_ids:
        weights[token] = 0.0
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: spec.top_k] if spec.top_k > 0 else order
    total = sum(weights[i] for i in kept)
    before, run = 0.0, list[int]()
    for i in kept:
        if before < spec.top_p * total:
            run.append(i)
        before += weights[i]
    run = [i for i in run if weights[i] >= spec.min_p * weights[order[0]]]
    total = sum(weights[i] for i in run)
    return [weights[i] / total if i in run else 0.0 for i in range(len(weights))]


def draws(specs: list[SampleSpec]) -> list[int]:
    tokens = sample(torch.tensor([LOGITS] * len(specs)), specs)
    return [token for token in tokens if token is not None]


def chi_square(tokens: list[int], probs: list[float]) -> tuple[float, float]:
    """Return the statistic and the bound it exceeds once in about 10,000 (Wilson–Hilferty)."""
    expected = [p * len(tokens) for p in probs]
    observed = [tokens.count(token) for token in range(len(probs))]
    if any(o and not e for o, e in zip(observed, expected, strict=True)):
        return math.inf, 0.0
    terms = [(o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e]
    freedom = len(terms) - 1
    spread = 2 / (9 * max(freedom, 1))
    return sum(terms), freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_follow_the_exact_distribution(name: str, vary: str) -> None:
    """Along one request (positions), and across requests (seeds, as after `n`)."""
    specs = [SampleSpec(**FILTERS[name], **{vary: i}) for i in range(DRAWS)]
    tokens = draws(specs)
    assert len(tokens) == DRAWS
    statistic, bound = chi_square(tokens, exact(specs[0]))
    assert statistic <= bound


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "plain"])
def test_the_chi_square_test_would_notice(name: str) -> None:
    """Negative control: draws without the setting do not pass for draws with it."""
    tokens = draws([SampleSpec(position=i) for i in range(DRAWS)])
    statistic, bound = chi_square(tokens, exact(SampleSpec(**FILTERS[name])))
    assert statistic > bound


def mixed_batch(num_rows: int) -> tuple[torch.Tensor, list[SampleSpec]]:
    rng = random.Random(num_rows)
    logits = torch.randn(num_rows, 500, generator=torch.Generator().manual_seed(num_rows)) * 3
    specs = [
        SampleSpec(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
            top_k=rng.choice([-1, 1, 5, 100]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.5]),
            output_ids=tuple(rng.choices(range(500), k=20)),
            banned_ids=rng.choice([(), (7, 8)]),
            seed=rng.randrange(-(2**63), 2**63),
            position=rng.randrange(1000),
        )
        for _ in range(num_rows)
    ]
    return logits.bfloat16(), specs


@pytest.mark.parametrize("num_rows", [1, 7, 33])
def test_a_draw_does_not_depend_on_the_batch(num_rows: int) -> None:
    """Each row alone, in its batch, and in the batch in another order: the same token."""
    logits, specs = mixed_batch(33)
    alone = [sample(logits[i : i + 1], [specs[i]])[0] for i in range(33)]
    order = random.Random(0).sample(range(33), num_rows)
    together = sample(logits[order], [specs[i] for i in order])
    assert together == [alone[i] for i in order]


def test_the_draw_depends_on_seed_and_position() -> None:
    """Negative control of the test above."""
    base = [SampleSpec(position=i) for i in range(50)]
    assert draws(base) == draws(base)
    assert draws(base) != draws([SampleSpec(position=i + 1) for i in range(50)])
    assert draws(base) != draws([SampleSpec(position=i, seed=1) for i in range(50)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[5, [17, 400, 999]] = 9.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    for greedy in (SampleSpec(temperature=0.0), SampleSpec(temperature=5e-7), SampleSpec(top_k=1)):
        assert sample(logits, [greedy] * 40) == expected
    assert expected[5] == 17


def test_a_tiny_top_p_or_temperature_leaves_the_best_token() -> None:
    for spec in (
        SampleSpec(top_p=1e-9),
        SampleSpec(top_p=5e-324),
        SampleSpec(min_p=1.0),
        SampleSpec(temperature=2e-6),
    ):
        assert sample(torch.tensor([LOGITS]), [spec]) == [5]


def test_huge_logits_do_not_overflow_at_a_small_temperature() -> None:
    logits = torch.tensor([[3e38, 1e38, -3e38]])
    assert sample(logits, [SampleSpec(temperature=1e-5)]) == [0]


def test_filters_that_keep_everything_change_no_draw() -> None:
    logits, specs = mixed_batch(33)
    plain = [SampleSpec(seed=spec.seed, position=spec.position) for spec in specs]
    inert = [
        SampleSpec(seed=spec.seed, position=spec.position, top_k=500, top_p=1.0) for spec in specs
    ]
    assert sample(logits, inert) == sample(logits, plain)


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    specs = [SampleSpec(top_k=2, position=i) for i in range(300)]
    assert set(sample(logits.repeat(300, 1), specs)) == {0, 1, 2, 4}


@pytest.mark.parametrize("spec", [SampleSpec(), SampleSpec(top_p=0.5), SampleSpec(top_k=3)])
def test_a_token_that_is_left_alone_is_drawn(spec: SampleSpec) -> None:
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4] = -1e30
    assert sample(logits, [spec]) == [4]


def test_bias_forces_and_forbids() -> None:
    force = SampleSpec(logit_bias=((3, 100.0),))
    forbid = SampleSpec(temperature=0.0, logit_bias=((5, -100.0),))
    assert sample(torch.tensor([LOGITS] * 2), [force, forbid]) == [3, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("spec", [SampleSpec(temperature=0.0), SampleSpec(), SampleSpec(top_p=0.7)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, spec: SampleSpec) -> None:
    logits, _ = mixed_batch(7)
    specs = [spec] * 7
    expected = sample(logits, specs)
    logits[2, 123] = bad
    assert sample(logits, specs) == [*expected[:2], None, *expected[3:]]


def test_a_ban_does_not_hide_a_broken_row() -> None:
    logits = torch.zeros(2, 5)
    logits[0, 1] = torch.nan
    assert sample(logits, [SampleSpec(temperature=0.0, banned_ids=(1,))] * 2) == [None, 0]


def test_a_row_without_a_token_to_draw_fails() -> None:
    everything = SampleSpec(banned_ids=tuple(range(8)))
    assert sample(torch.tensor([LOGITS] * 2), [everything, SampleSpec(top_k=1)]) == [None, 5]


def test_the_logits_are_not_modified() -> None:
    logits, specs = mixed_batch(7)
    logits, before = logits.float(), logits.float().clone()
    sample(logits, specs)
    assert torch.equal(logits, before)


def test_uniform_numbers_are_even_and_unrelated_between_neighbours() -> None:
    """Mean 1/2 and variance 1/12 of 20,000 numbers, correlation below 4 / sqrt(n)."""
    count = 20_000
    every, same = list(range(count)), [0] * count
    for numbers, neighbours in (
        ((same, every), ([1] * count, every)),
        ((every, same), (every, [1] * count)),
        ((every, [5] * count), (range(1, count + 1), [4] * count)),
    ):
        pair = torch.stack([torch.from_numpy(uniforms(*at)) for at in (numbers, neighbours)])
        pair = pair.double()
        assert pair.min() >= 0
        assert pair.max() < 1
        assert (pair.mean(dim=1) - 0.5).abs().max() < 4 / math.sqrt(12 * count)
        assert (pair.var(dim=1) - 1 / 12).abs().max() < 0.002
        assert torch.corrcoef(pair)[0, 1].abs() < 4 / math.sqrt(count)


def test_a_seed_draws_what_it_has_always_drawn() -> None:
    """Also one that does not fit into 64 bits, or is negative."""
    seeds, positions = [0, 1, -5, 2**63 - 1, 2**64 + 3], [0, 1, 2, 100_000, 7]
    assert (uniforms(seeds, positions) * 2**24).tolist() == [
        14819496,
        6247724,
        1942587,
        6499511,
        13235478,
    ]
