# SPDX-License-Identifier: Apache-2.0
"""What a sequence has generated: whether it ends here, and what its client has not heard yet."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

from tetrarch.engine.acceptance import Acceptance
from tetrarch.engine.request import Delta, FinishReason, WeightSpan
from tetrarch.engine.sequence import Sequence
from tetrarch.engine.stream import OutputText
from tetrarch.executor.step import TokenLogprob

__all__ = ["Output"]


class Output:
    """The outward side of a sequence.

    Attributes:
        seq: The inward side.
        times: As in `Delta`.
        acceptance: Of the drafts that were verified for it.
    """

    def __init__(self, seq: Sequence, *, interval: int, text: OutputText | None) -> None:
        """Begin.

        Args:
            seq: Its tokens grow here.
            interval: Tokens that a delta gathers.
            text: Finds stop strings and patterns; `None` where the request has none.
        """
        self.seq = seq
        self._interval, self._text = interval, text
        self._told = 0  # output tokens that the client knows
        self._logprobs: list[TokenLogprob] = []  # of those it does not
        self._told_prompt = False
        self._closed: list[WeightSpan] = []  # of versions that draw no more
        self._version, self._drawn_since = "", 0  # the one that draws, and its first output
        self.times = {"received": time.monotonic()}
        self.acceptance = Acceptance()

    def take(
        self, token_ids: Many[int], logprobs: Many[TokenLogprob], *, version: str
    ) -> FinishReason | None:
        """Append new tokens until one of them ends the output.

        Args:
            token_ids: As drawn.
            logprobs: One each, or none.
            version: Of the weights that drew them.

        Returns:
            Why the output ends, or `None` while it goes on.
        """
        if token_ids and "first_token" not in self.times:
            self.times["first_token"] = time.monotonic()
        for index, token_id in enumerate(token_ids):
            self.seq.tokens.append(token_id)
            if logprobs:
                self._logprobs.append(logprobs[index])
            if version != self._version:
                self._change_version(version)
            if (finish := self._finish(token_id)) is not None:
                return finish
        return None

    @property
    def is_due(self) -> bool:
        """Whether the client should hear something now; the first token never waits."""
        news = self.seq.num_outputs - self._told
        return news >= self._interval or (news > 0 and self._told == 0)

    def delta(self, finish: FinishReason | None = None) -> Delta:
        """Return what is new, and count it as told."""
        seq = self.seq
        if finish is not None:
            self.times["finished"] = time.monotonic()
        logprobs, self._logprobs = self._logprobs, []
        is_scored = seq.num_outputs > 0 or (finish is not None and finish.kind != "abort")
        tells_prompt = is_scored and not self._told_prompt
        self._told_prompt |= tells_prompt
        token_ids = tuple(seq.tokens[seq.num_prompt + self._told :])
        self._told = seq.num_outputs
        return Delta(
            rid=seq.request.rid,
            token_ids=token_ids,
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(seq.scored) if tells_prompt else (),
            finish=finish,
            num_cached=seq.num_cached,
            num_retractions=seq.num_retractions,
            versions=self._spans,
            times=dict(self.times),
            acceptance=self.acceptance.copy() if self.acceptance.num_verifies else None,
        )

    def _change_version(self, version: str) -> None:
        """Note that the last token is the first one of this version."""
        end = self.seq.num_outputs - 1
        if end > 0:
            self._closed.append(WeightSpan(self._version, self._drawn_since, end))
        self._version, self._drawn_since = version, end

    @property
    def _spans(self) -> tuple[WeightSpan, ...]:
        if (end := self.seq.num_outputs) == 0:
            return ()
        return (*self._closed, WeightSpan(self._version, self._drawn_since, end))

    def _finish(self, token_id: int) -> FinishReason | None:
        seq = self.seq
        if token_id in seq.end_ids and seq.num_outputs > seq.request.sampling.min_new_tokens:
            return FinishReason(kind="stop", matched=token_id)
        if self._text is not None:
            self._text.push((token_id,))
            if self._text.matched is not None:
                return FinishReason(kind="stop", matched=self._text.matched)
            if self._text.too_slow is not None:
                return _too_slow(self._text.too_slow)
        if len(seq.tokens) >= seq.limit:
            return FinishReason(kind="length", length=seq.num_outputs)
        return None


def _too_slow(pattern: str) -> FinishReason:
    return FinishReason(
        kind="abort",
        message=f"stop_regex {pattern!r:.80} took too long to look for; repetitions inside "
        "repetitions, such as (a+)+, make a search explode",
        status=400,
        code="stop_regex_too_slow",
        param="stop_regex",
    )
