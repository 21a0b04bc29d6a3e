# SPDX-License-Identifier: Apache-2.0
"""Steps are plain data: they count their tokens and survive the trip to another rank."""

from __future__ import annotations

import pickle

from tetrarch.executor.step import (
    Phase,
    PromptScoring,
    SampleSpec,
    SeqChunk,
    SeqResult,
    Step,
    StepResult,
    TokenLogprob,
)

CHUNK = SeqChunk(
    row=3,
    token_ids=(5, 6, 7),
    start=16,
    pages=(4, 9),
    samples=(SampleSpec(temperature=0.5, logit_bias=((7, -1.5),), seed=11, position=2),),
    scoring=PromptScoring(first=1, targets=(7, 8), top_logprobs=2, logprob_ids=(1,)),
)


def test_a_step_counts_the_tokens_of_all_its_chunks() -> None:
    short = SeqChunk(row=0, token_ids=(1,), start=0, pages=(1,))
    step = Step(phase=Phase.PREFILL, seqs=(CHUNK, short), rank_tokens=(4,))
    assert step.num_tokens == 4
    assert Step(phase=Phase.IDLE, seqs=(), rank_tokens=(0, 7)).num_tokens == 0


def test_steps_and_results_are_the_same_after_a_trip_to_another_rank() -> None:
    step = Step(phase=Phase.DECODE, seqs=(CHUNK,), rank_tokens=(3, 0))
    assert pickle.loads(pickle.dumps(step)) == step
    entry = TokenLogprob(7, -0.25, top=((7, -0.25), (8, -1.5)), picked=((1, -9.0),))
    result = StepResult((SeqResult(token_ids=(7,), logprobs=(entry,)), SeqResult(failed=True)))
    assert pickle.loads(pickle.dumps(result)) == result
