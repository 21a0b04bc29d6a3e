# SPDX-License-Identifier: Apache-2.0
"""Every sequence gets its own rows of the logits."""

from __future__ import annotations

import torch

from tetrarch.executor.results import step_result
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
    first, idle, plain, scored = step_result(STEP, logits).seqs

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
    (result,) = step_result(step_of(seq(spec)), logits).seqs
    assert result.token_ids == (0,)
    assert abs(result.logprobs[0].logprob - logits.double().log_softmax(-1)[0, 0]) < 1e-6
    assert result.logprobs[0].top[0][0] == 2


def test_a_broken_row_fails_its_sequence_and_no_other() -> None:
    whole = step_result(STEP, logits_with([5, 3, 0, 1, 2])).seqs
    for row, owner in ((0, 0), (1, 2), (2, 0), (3, 0), (4, 3)):
        logits = logits_with([5, 3, 0, 1, 2])
        logits[row, 1] = torch.nan
        results = step_result(STEP, logits).seqs
        assert [result.failed for result in results] == [i == owner for i in range(4)]
        assert all(results[i] == whole[i] for i in range(4) if i != owner)


def test_a_step_that_wants_nothing_returns_empty_results() -> None:
    (result,) = step_result(step_of(seq()), torch.zeros(0, 6)).seqs
    assert (result.token_ids, result.failed) == ((), False)
