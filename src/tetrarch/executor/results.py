# SPDX-License-Identifier: Apache-2.0
"""The logits of one step → StepResult."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor

from tetrarch.executor.logprobs import LogprobQuery, token_logprobs
from tetrarch.executor.sample import sample
from tetrarch.executor.step import (
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
        logits has failed; the others are not affected. Where that row is a draft's, the tokens
        drawn before it are good, and part of the result.
    """
    specs = [spec for seq in step.seqs for spec in seq.samples]
    drawn = iter(sample(logits[: len(specs)], specs) if specs else ())
    accepted = [_accepted(list(islice(drawn, len(seq.samples))), seq.drafts) for seq in step.seqs]
    logprobs = iter(token_logprobs(*_asked(step.seqs, accepted, logits)))
    queries = [query for seq in step.seqs for query in _prompt_queries(seq)]
    scored = iter(token_logprobs(logits[len(specs) :], queries))
    return StepResult(
        tuple(
            _result(seq, token_ids, logprobs, scored)
            for seq, token_ids in zip(step.seqs, accepted, strict=True)
        )
    )


def _accepted(drawn: Sequence[int | None], drafts: Sequence[int]) -> tuple[int | None, ...]:
    """Return the tokens that follow one another; `None` for the last: its logits are broken.

    Each row's token is drawn by the number that decides it without speculation too. It counts
    while all drafts before it are what was drawn. That is rejection sampling against a draft that
    is certain of itself, so the output has the target's own distribution.
    """
    for index, (token, draft) in enumerate(zip(drawn, drafts, strict=False)):
        if token != draft:
            return tuple(drawn[: index + 1])
    return tuple(drawn)


def _asked(
    seqs: Sequence[SeqChunk], accepted: Sequence[tuple[int | None, ...]], logits: Tensor
) -> tuple[Tensor, list[LogprobQuery]]:
    """Return the rows of accepted tokens whose request wants logprobs, and what it wants."""
    rows: list[int] = []
    queries: list[LogprobQuery] = []
    first = 0
    for seq, token_ids in zip(seqs, accepted, strict=True):
        for row, (token_id, spec) in enumerate(zip(token_ids, seq.samples, strict=False), first):
            if token_id is not None and spec.top_logprobs >= 0:
                rows.append(row)
                queries.append(LogprobQuery(token_id, spec.top_logprobs, spec.logprob_ids))
        first += len(seq.samples)
    return logits[rows], queries


def _prompt_queries(seq: SeqChunk) -> list[LogprobQuery]:
    if (scoring := seq.scoring) is None:
        return []
    return [
        LogprobQuery(target, scoring.top_logprobs, scoring.logprob_ids)
        for target in scoring.targets
    ]


def _result(
    seq: SeqChunk,
    accepted: tuple[int | None, ...],
    logprobs: Iterator[TokenLogprob | None],
    scored: Iterator[TokenLogprob | None],
) -> SeqResult:
    """Give a sequence its share of the answers, which come in step order."""
    token_ids = tuple(token_id for token_id in accepted if token_id is not None)
    asks = bool(seq.samples) and seq.samples[0].top_logprobs >= 0
    own = tuple(islice(logprobs, len(token_ids) if asks else 0))
    prompt = tuple(islice(scored, 0 if seq.scoring is None else len(seq.scoring.targets)))
    return SeqResult(
        token_ids=token_ids,
        logprobs=tuple(answer for answer in own if answer is not None),
        prompt_logprobs=tuple(answer for answer in prompt if answer is not None),
        failed=None in accepted or None in prompt,
    )
