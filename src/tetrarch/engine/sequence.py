# SPDX-License-Identifier: Apache-2.0
"""A request while it lives in the engine: its tokens, its pages, and the chunk it computes next."""

from __future__ import annotations

import random

from msgspec import structs

from tetrarch.core.units import ceil_div
from tetrarch.engine.adaptive import DraftLength
from tetrarch.engine.request import GenerateRequest
from tetrarch.executor.step import (
    FUTURE,
    DraftWork,
    PromptScoring,
    SampleSpec,
    SeqChunk,
    SeqResult,
    TokenLogprob,
)

__all__ = ["Sequence"]

_GREEDY_BELOW = 1e-6  # temperature


class Sequence:
    """Tokens in order, of which the first `num_computed` are in the KV pages.

    Generating is nothing special: every new token makes the sequence one longer than what is
    computed. So a sequence that loses its pages is simply one with more left to compute.

    A step that is in flight has computed nothing yet, but all that follows it may count on that.
    So the next step begins at `num_launched`, with tokens of which the last may still be unknown.

    Attributes:
        tokens: Those that are known.
        num_future: Tokens behind these that steps in flight will draw.
        num_launched: Tokens that will be in the pages when what is in flight has run.
        reads_outputs: Which token is drawn depends on those before it by more than the logits.
        order: Arrival; the scheduler serves the lowest first.
        limit: Tokens at which the sequence ends, prompt included.
        end_ids: Tokens that end the output.
        row: Index among the running sequences; `None` while it waits.
        pages: Of all computed tokens, and of those being computed.
        known: How many of the pages are known to the prefix cache.
        num_cached: Prompt tokens found in the cache when it first ran.
        scored: Prompt logprobs so far.
        length: How many drafts it is worth; `None`: nobody drafts for it.
        drafts: What the draft believes to come after `tokens`. A proposal only: whatever they
            are, and whichever weights made them, the output is the same.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        order: int,
        limit: int,
        end_ids: frozenset[int],
        length: DraftLength | None = None,
    ) -> None:
        self.request, self.order, self.limit, self.end_ids = request, order, limit, end_ids
        seed = request.sampling.sampling_seed
        seed = random.getrandbits(63) if seed is None else seed
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = self.num_launched = self.num_future = 0
        self.row: int | None = None
        self.pages: tuple[int, ...] = ()
        self.known = 0
        self.num_cached = 0
        self.num_retractions = 0
        self.scored: list[TokenLogprob] = []
        self.length = length
        self.drafts: tuple[int, ...] = ()
        scores = request.return_logprobs and request.logprob_start >= 0
        sampling = request.sampling
        self.reads_outputs = (
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
        )
        self._ends = tuple(sorted(end_ids))
        self._spec = _spec(request, seed)
        self._first_score = max(request.logprob_start, 1) if scores else self.num_prompt

    @property
    def num_outputs(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def size(self) -> int:
        """Tokens, those included that nobody knows yet."""
        return len(self.tokens) + self.num_future

    @property
    def num_left(self) -> int:
        """Tokens to launch; 1 while generating, 0 behind the last one that may be drawn."""
        size = len(self.tokens) + self.num_future
        if size >= self.limit and self.num_launched >= self.num_prompt:
            return 0
        return size - self.num_launched

    @property
    def is_computed(self) -> bool:
        """Whether it waits for no token: nothing was to be generated, and all is computed."""
        return self.num_computed == len(self.tokens)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """What was generated."""
        return tuple(self.tokens[self.num_prompt :])

    @property
    def match_limit(self) -> int:
        """How many tokens may come from the prefix cache.

        The last token is always computed, for its logits; and so are the tokens that predict a
        prompt token whose logprob is still wanted.
        """
        next_score = self._first_score + len(self.scored)
        return next_score - 1 if next_score < self.num_prompt else len(self.tokens) - 1

    def pages_for(self, num_tokens: int, *, page_size: int) -> int:
        """Return how many pages are missing to hold the first `num_tokens` tokens."""
        return max(0, ceil_div(num_tokens, page_size) - len(self.pages))

    def forget_scores(self) -> None:
        """Score a prompt from its beginning again, unless all of it is scored."""
        if self.num_outputs == 0:
            self.scored.clear()

    @property
    def num_useful(self) -> int:
        """How many of the drafts could all be part of the output, and one more token."""
        return max(0, min(len(self.drafts), self.limit - len(self.tokens) - 1))

    @property
    def num_wanted(self) -> int:
        """How many drafts the step after the next one may verify; 0 leaves the draft idle."""
        if self.length is None:
            return 0
        return max(0, min(self.length.current, self.limit - len(self.tokens) - 2))

    def chunk(self, count: int, *, num_drafts: int = 0) -> SeqChunk:
        """Return the next `count` tokens as the executor takes them, and drafts behind them."""
        assert self.row is not None
        start, end = self.num_launched, self.num_launched + count
        draws = end == self.size < self.limit
        drafts = self.drafts[:num_drafts]
        future = (FUTURE,) if end > len(self.tokens) else ()
        return SeqChunk(
            row=self.row,
            token_ids=(*self.tokens[start:end], *future, *drafts),
            start=start,
            pages=self.pages,
            samples=self._samples(drafts) if draws else (),
            scoring=self._scoring(start, end),
            draft=self._work(end),
        )

    def launch(self, chunk: SeqChunk) -> None:
        """Count a chunk of its own as computed by all that will be launched behind it."""
        self.num_launched += len(chunk.token_ids)
        self.num_future += bool(chunk.samples)

    def land(self, chunk: SeqChunk, outcome: SeqResult) -> None:
        """Note that a chunk has run; what it has drawn is still to be added to `tokens`.

        The rows behind the one that drew the last token, if any, have computed nothing of it.
        """
        num_wrong = len(chunk.samples) - len(outcome.token_ids) if chunk.drafts else 0
        self.num_launched -= num_wrong
        self.num_computed += len(chunk.token_ids) - num_wrong
        self.num_future -= bool(chunk.samples)
        self.drafts = outcome.drafts

    def stop(self) -> None:
        """Lose row and pages; all tokens are to be computed again."""
        self.row, self.pages, self.drafts = None, (), ()
        self.known = self.num_computed = self.num_launched = self.num_future = 0

    def _work(self, end: int) -> DraftWork | None:
        if (wanted := self.num_wanted) == 0:
            return None
        goes_on = end < len(self.tokens)
        return DraftWork(
            next_id=self.tokens[end] if goes_on else None, num_drafts=0 if goes_on else wanted
        )

    def _samples(self, drafts: tuple[int, ...]) -> tuple[SampleSpec, ...]:
        """Return how to draw the next token, and the one after each draft if that is right."""
        first = self._sample()
        if not drafts:
            return (first,)
        least = self.request.sampling.min_new_tokens
        return tuple(
            structs.replace(
                first,
                position=first.position + ahead,
                output_ids=first.output_ids + drafts[:ahead] if self.reads_outputs else (),
                banned_ids=self._ends if first.position + ahead < least else (),
            )
            for ahead in range(len(drafts) + 1)
        )

    def _sample(self) -> SampleSpec:
        position = self.size - self.num_prompt
        if position >= self.request.sampling.min_new_tokens and not self.reads_outputs:
            return structs.replace(self._spec, position=position)
        return structs.replace(
            self._spec,
            position=position,
            output_ids=self.output_ids if self.reads_outputs else (),
            banned_ids=self._ends if position < self.request.sampling.min_new_tokens else (),
        )

    def _scoring(self, start: int, end: int) -> PromptScoring | None:
        """Return what rows `start` to `end - 1` say about the prompt tokens after them."""
        first = max(self._first_score + len(self.scored), start + 1)
        targets = self.request.prompt_ids[first : end + 1]
        if not targets:
            return None
        return PromptScoring(
            first=first - 1 - start,
            targets=targets,
            top_logprobs=self.request.top_logprobs,
            logprob_ids=self.request.logprob_ids,
        )


def _spec(request: GenerateRequest, seed: int) -> SampleSpec:
    """Return how to draw a request's first token, but for bans."""
    sampling = request.sampling
    return SampleSpec(
        temperature=0.0 if sampling.temperature < _GREEDY_BELOW else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        seed=seed,
        prompt_ids=request.prompt_ids if sampling.repetition_penalty != 1.0 else (),
        top_logprobs=request.top_logprobs if request.return_logprobs else -1,
        logprob_ids=request.logprob_ids if request.return_logprobs else (),
    )
