# SPDX-License-Identifier: Apache-2.0
"""Penalties, bias and bans against a slow reading of their definitions."""

from __future__ import annotations

import random

import pytest
import torch

from tetrarch.executor.penalties import edit_logits
from tetrarch.executor.step import SampleSpec

VOCAB = 50


def oracle(logits: list[float], spec: SampleSpec) -> list[float]:
    """Token by token, in double precision."""
    edited = list(logits)
    for token in range(len(logits)):
        count = spec.output_ids.count(token)
        if count or token in spec.prompt_ids:
            p = spec.repetition_penalty
            edited[token] = edited[token] / p if edited[token] > 0 else edited[token] * p
        if count:
            edited[token] -= count * spec.frequency_penalty + spec.presence_penalty
    for token, bias in spec.logit_bias:
        edited[token] += bias
    for token in spec.banned_ids:
        edited[token] = -float("inf")
    return edited


def random_spec(rng: random.Random) -> SampleSpec:
    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(VOCAB), k=rng.randint(0, most)))

    return SampleSpec(
        frequency_penalty=rng.choice([0.0, 0.3, -2.0]),
        presence_penalty=rng.choice([0.0, 1.5, -0.25]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.5]),
        prompt_ids=ids(30),
        output_ids=ids(30),
        banned_ids=ids(3),
        logit_bias=tuple((token, rng.uniform(-100, 100)) for token in set(ids(5))),
    )


@pytest.mark.parametrize("seed", range(20))
def test_edits_equal_the_definition_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    specs = [random_spec(rng) for _ in range(7)]
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    expected = torch.tensor(
        [oracle(row, spec) for row, spec in zip(logits.tolist(), specs, strict=True)]
    )
    torch.testing.assert_close(edit_logits(logits, specs), expected, rtol=1e-5, atol=1e-5)


def test_prompt_tokens_suffer_the_repetition_penalty_only() -> None:
    spec = SampleSpec(
        frequency_penalty=1.0, presence_penalty=1.0, repetition_penalty=2.0, prompt_ids=(3,)
    )
    assert edit_logits(torch.full((1, 5), 4.0), [spec]).tolist() == [[4.0, 4.0, 4.0, 2.0, 4.0]]


def test_rows_without_edits_are_returned_as_they_are() -> None:
    logits = torch.randn(2, 5)
    assert edit_logits(logits, [SampleSpec(), SampleSpec(output_ids=(1, 2))]) is logits


def test_the_logits_handed_in_are_not_modified() -> None:
    logits = torch.randn(1, 5)
    before = logits.clone()
    edit_logits(logits, [SampleSpec(banned_ids=(1,), logit_bias=((2, 3.0),))])
    assert torch.equal(logits, before)


def test_the_first_step_has_no_output_to_penalise() -> None:
    logits = torch.randn(1, 5)
    assert torch.equal(edit_logits(logits, [SampleSpec(presence_penalty=1.0)]), logits)
