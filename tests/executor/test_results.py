# SPDX-License-Identifier: Apache-2.0
"""Every sequence gets its own rows of the logits."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from tetrarch.executor.results import Draws
from tetrarch.executor.step import Phase, PromptScoring, SampleSpec, SeqChunk, Step

GREEDY = SampleSpec(temperature=0.0)
LOGPROBS = SampleSpec(temperature=0.0, top_logprobs=2, logprob_ids=(4,))


def seq(*samples: SampleSpec, targets: tuple[int, ...] = ()) -> SeqChunk:
    scoring = PromptScoring(first=0, targets=targets, top_logprobs=1) if targets else None
    return SeqChunk(
        row=0, token_ids=(0, 4, 3, 2), start=0, pages=(0,), samples=samples, scoring=scoring
    )


def step_of(*seqs: SeqChunk) -> Step:
    return Step(phase=Phase.PREFILL, seqs=seqs, rank_tokens=(4 * len(seqs),))


STEP = step_of(seq(LOGPROBS, targets=(1, 2)), seq(), seq(GREEDY), seq(targets=(3,)))


def logits_with(best: list[int]) -> torch.Tensor:
    logits = torch.randn(len(best), 6, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(len(best)), best] = 9.0
    return logits


def test_rows_go_to_the_sequences_that_asked_for_them() -> None:
    logits = logits_with([5, 3, 0, 1, 2])  # two sampled rows, then three scored ones
    exact = logits.double().log_softmax(-1)
    first, idle, plain, scored = Draws(STEP, logits).wait().seqs

    assert first.token_ids == (5,)
    (logprob,) = first.logprobs
    assert abs(logprob.logprob - exact[0, 5]) < 1e-6
    assert logprob.top[0] == (5, logprob.logprob)
    assert abs(logprob.picked[0][1] - exact[0, 4]) < 1e-6
    for answer, row, target, best in zip(
        (*first.prompt_logprobs, *scored.prompt_logprobs),
        (2, 3, 4),
        (1, 2, 3),
        (0, 1, 2),
        strict=True,
    ):
        assert answer.token_id == target
        assert abs(answer.logprob - exact[row, target]) < 1e-6
        assert [i for i, _ in answer.top] == [best]
    assert (plain.token_ids, plain.logprobs) == ((3,), ())
    assert (idle.token_ids, idle.prompt_logprobs, scored.token_ids) == ((), (), ())


def test_logprobs_are_the_models_own_whatever_the_request_changes() -> None:
    """Temperature, bias and bans move the draw, not the number beside it."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    spec = SampleSpec(temperature=0.1, logit_bias=((0, 90.0),), banned_ids=(2,), top_logprobs=1)
    (result,) = Draws(step_of(seq(spec)), logits).wait().seqs
    assert result.token_ids == (0,)
    assert abs(result.logprobs[0].logprob - logits.double().log_softmax(-1)[0, 0]) < 1e-6
    assert result.logprobs[0].top[0][0] == 2


def test_a_broken_row_fails_its_sequence_and_no_other() -> None:
    whole = Draws(STEP, logits_with([5, 3, 0, 1, 2])).wait().seqs
    for row, owner in ((0, 0), (1, 2), (2, 0), (3, 0), (4, 3)):
        logits = logits_with([5, 3, 0, 1, 2])
        logits[row, 1] = torch.nan
        results = Draws(STEP, logits).wait().seqs
        assert [result.failed for result in results] == [i == owner for i in range(4)]
        assert all(results[i] == whole[i] for i in range(4) if i != owner)


VERIFY = seq(GREEDY, LOGPROBS, LOGPROBS)  # drafts 3 and 2


@pytest.mark.parametrize(
    ("best", "accepted"), [([1, 3, 2], 1), ([3, 4, 2], 2), ([3, 2, 5], 3), ([2, 3, 2], 1)]
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(best: list[int], accepted: int) -> None:
    asks = replace(VERIFY, samples=(LOGPROBS,) * 3)
    logits = logits_with([0, *best, 1])
    exact = logits.double().log_softmax(-1)
    first, result, last = Draws(step_of(seq(GREEDY), asks, seq(GREEDY)), logits).wait().seqs
    assert result.token_ids == tuple(best[:accepted])
    assert (first.token_ids, last.token_ids) == ((0,), (1,))
    assert len(result.logprobs) == accepted
    for row, answer in enumerate(result.logprobs, start=1):
        assert (answer.token_id, answer.top[0][0]) == (best[row - 1], best[row - 1])
        assert abs(answer.logprob - exact[row, answer.token_id]) < 1e-6
        assert abs(answer.picked[0][1] - exact[row, 4]) < 1e-6


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_is_drawn_before_a_broken_row_is_good(broken: int) -> None:
    logits = logits_with([3, 2, 5])
    logits[broken, 1] = torch.nan
    (result,) = Draws(step_of(VERIFY), logits).wait().seqs
    assert result.failed
    assert result.token_ids == (3, 2, 5)[:broken]


def test_a_broken_row_behind_a_wrong_draft_does_not_matter() -> None:
    logits = logits_with([1, 2, 5])
    logits[1:] = torch.nan
    (result,) = Draws(step_of(VERIFY), logits).wait().seqs
    assert (result.token_ids, result.failed) == ((1,), False)


def test_a_step_that_wants_nothing_returns_empty_results() -> None:
    (result,) = Draws(step_of(seq()), torch.zeros(0, 6)).wait().seqs
    assert (result.token_ids, result.failed) == ((), False)
