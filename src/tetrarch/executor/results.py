# SPDX-License-Identifier: Apache-2.0
"""The logits of one step → StepResult."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from torch import Tensor

from tetrarch.executor.logprobs import LogprobQuery, token_logprobs
from tetrarch.executor.sample import sample
from tetrarch.executor.step import (
    SampleSpec,
    SeqChunk,
    SeqResult,
    Step,
    StepResult,
    TokenLogprob,
)

__all__ = ["step_result"]


def step_result(step: Step, logits: Tensor) -> StepResult:
    """Draw the tokens of one step and collect the logprobs it was asked for.

    Args:
        step: What was computed.
        logits: (L, V) any float type, rows as `ForwardBatch.logits_at` lists them.

    Returns:
        One result per sequence, in step order. A sequence with NaN or +Inf in a row of its
        logits has failed; the others are not affected.
    """
    specs = [seq.sample for seq in step.seqs if seq.sample is not None]
    sampled = iter(_sampled(logits[: len(specs)], specs))
    queries = [query for seq in step.seqs for query in _prompt_queries(seq)]
    scored = iter(token_logprobs(logits[len(specs) :], queries))
    results: list[SeqResult] = []
    for seq in step.seqs:
        result = SeqResult() if seq.sample is None else next(sampled)
        num_scored = 0 if seq.scoring is None else len(seq.scoring.targets)
        results.append(_with_prompt(result, islice(scored, num_scored)))
    return StepResult(tuple(results))


def _sampled(logits: Tensor, specs: Sequence[SampleSpec]) -> list[SeqResult]:
    tokens = sample(logits, specs) if specs else []
    results = [SeqResult(failed=True) if i is None else SeqResult(token_ids=(i,)) for i in tokens]
    asked = [
        (row, LogprobQuery(token, spec.top_logprobs, spec.logprob_ids))
        for row, (token, spec) in enumerate(zip(tokens, specs, strict=True))
        if token is not None and spec.top_logprobs >= 0
    ]
    if asked:
        answers = token_logprobs(logits[[row for row, _ in asked]], [query for _, query in asked])
        for (row, query), answer in zip(asked, answers, strict=True):
            if answer is not None:
                results[row] = SeqResult(token_ids=(query.token_id,), logprobs=(answer,))
    return results


def _prompt_queries(seq: SeqChunk) -> list[LogprobQuery]:
    if (scoring := seq.scoring) is None:
        return []
    return [
        LogprobQuery(target, scoring.top_logprobs, scoring.logprob_ids)
        for target in scoring.targets
    ]


def _with_prompt(result: SeqResult, answers: Iterable[TokenLogprob | None]) -> SeqResult:
    prompt = tuple(answers)
    whole = tuple(answer for answer in prompt if answer is not None)
    if result.failed or len(whole) < len(prompt):
        return SeqResult(failed=True)
    return SeqResult(token_ids=result.token_ids, logprobs=result.logprobs, prompt_logprobs=whole)
