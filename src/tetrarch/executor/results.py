# SPDX-License-Identifier: Apache-2.0
"""The logits of one step → StepResult: drawn on the device, read on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from tetrarch.executor.logprobs import LogprobQuery, Scores
from tetrarch.executor.sample import sample
from tetrarch.executor.step import (
    SampleSpec,
    SeqChunk,
    SeqResult,
    Step,
    StepResult,
    TokenLogprob,
)
from tetrarch.executor.transfer import Download, upload

__all__ = ["Draws"]


class Draws:
    """The tokens of one step and the logprobs it was asked for, on their way to the host.

    Attributes:
        token_ids: (N,) int64, on the device, one a sampled row; -1 where the logits are broken.
    """

    def __init__(self, step: Step, logits: Tensor) -> None:
        """Draw, and start the copies to the host.

        Args:
            step: What was computed.
            logits: (L, V) any float type, rows as `ForwardBatch.logits_at` lists them.
        """
        self._seqs = step.seqs
        specs = [spec for seq in step.seqs for spec in seq.samples]
        self.token_ids = sample(logits[: len(specs)], specs)
        self._download = Download((self.token_ids,))
        self._asking = [row for row, spec in enumerate(specs) if spec.top_logprobs >= 0]
        self._own = _score_drawn(logits, self.token_ids, specs, self._asking)
        self._targets = [i for seq in step.seqs if seq.scoring for i in seq.scoring.targets]
        self._prompt = _score_prompts(logits[len(specs) :], step.seqs, self._targets)

    def wait(self) -> StepResult:
        """Return one result per sequence, in step order.

        A sequence with NaN or +Inf in a row of its logits has failed; the others are not affected.
        Where that row is a draft's, the tokens drawn before it are good, and part of the result.
        """
        (drawn,) = self._download.wait()
        token_ids = [None if i < 0 else i for i in drawn.tolist()]
        if self._is_plain:
            return StepResult(
                tuple(
                    SeqResult(failed=True) if i is None else SeqResult(token_ids=(i,))
                    for i in token_ids
                )
            )
        own: list[TokenLogprob | None] = [None] * len(token_ids)
        if self._own is not None:
            answers = self._own.wait([token_ids[row] or 0 for row in self._asking])
            for row, answer in zip(self._asking, answers, strict=True):
                own[row] = answer
        scored = () if self._prompt is None else self._prompt.wait(self._targets)
        share = iter(token_ids), iter(own), iter(scored)
        return StepResult(tuple(_result(seq, *share) for seq in self._seqs))

    @property
    def _is_plain(self) -> bool:
        """Whether every sequence draws one token and asks for nothing else, as most decodes do."""
        if self._own is not None or self._prompt is not None:
            return False
        return all(len(seq.samples) == 1 for seq in self._seqs)


def _score_drawn(
    logits: Tensor, token_ids: Tensor, specs: Sequence[SampleSpec], asking: Sequence[int]
) -> Scores | None:
    """Score what was drawn, in the rows that want that; a draft's too that will prove wrong."""
    if not asking:
        return None
    (rows,) = upload(logits.device, np.array(asking, np.int64))
    queries = [LogprobQuery(specs[row].top_logprobs, specs[row].logprob_ids) for row in asking]
    return Scores(logits[rows], token_ids[rows].clamp(min=0), queries)


def _score_prompts(
    logits: Tensor, seqs: Sequence[SeqChunk], targets: Sequence[int]
) -> Scores | None:
    if not targets:
        return None
    (token_ids,) = upload(logits.device, np.array(targets, np.int64))
    queries = [
        LogprobQuery(seq.scoring.top_logprobs, seq.scoring.logprob_ids)
        for seq in seqs
        if seq.scoring is not None
        for _ in seq.scoring.targets
    ]
    return Scores(logits, token_ids, queries)


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


def _result(
    seq: SeqChunk,
    drawn: Iterator[int | None],
    own: Iterator[TokenLogprob | None],
    scored: Iterator[TokenLogprob | None],
) -> SeqResult:
    """Give a sequence its share of the answers, which come in step order."""
    size = len(seq.samples)
    accepted = _accepted(list(islice(drawn, size)), seq.drafts)
    token_ids = tuple(token_id for token_id in accepted if token_id is not None)
    logprobs = list(islice(own, size))[: len(token_ids)]
    prompt = () if seq.scoring is None else tuple(islice(scored, len(seq.scoring.targets)))
    return SeqResult(
        token_ids=token_ids,
        logprobs=tuple(answer for answer in logprobs if answer is not None),
        prompt_logprobs=tuple(answer for answer in prompt if answer is not None),
        failed=None in accepted or None in prompt,
    )
