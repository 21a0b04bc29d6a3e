# SPDX-License-Identifier: Apache-2.0
"""A request while it lives in the engine: its tokens, its pages, and the chunk it computes next."""

from __future__ import annotations

import random

from tetrarch.core.units import ceil_div
from tetrarch.engine.request import GenerateRequest
from tetrarch.executor.step import PromptScoring, SampleSpec, SeqChunk, TokenLogprob

__all__ = ["Sequence"]

_GREEDY_BELOW = 1e-6  # temperature


class Sequence:
    """Tokens in order, of which the first `num_computed` are in the KV pages.

    Generating is nothing special: every new token makes the sequence one longer than what is
    computed. So a sequence that loses its pages is simply one with more left to compute.

    Attributes:
        order: Arrival; the scheduler serves the lowest first.
        limit: Tokens at which the sequence ends, prompt included.
        end_ids: Tokens that end the output.
        row: Index among the running sequences; `None` while it waits.
        pages: Of all computed tokens, and of those being computed.
        known: How many of the pages are known to the prefix cache.
        num_cached: Prompt tokens found in the cache when it first ran.
        scored: Prompt logprobs so far.
    """

    def __init__(
        self, request: GenerateRequest, *, order: int, limit: int, end_ids: frozenset[int]
    ) -> None:
        self.request, self.order, self.limit, self.end_ids = request, order, limit, end_ids
        seed = request.sampling.sampling_seed
        self._seed = random.getrandbits(63) if seed is None else seed
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.row: int | None = None
        self.pages: tuple[int, ...] = ()
        self.known = 0
        self.num_cached = 0
        self.num_retractions = 0
        self.scored: list[TokenLogprob] = []
        scores = request.return_logprobs and request.logprob_start >= 0
        self._first_score = max(request.logprob_start, 1) if scores else self.num_prompt

    @property
    def num_outputs(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens not computed yet; 1 while generating."""
        return len(self.tokens) - self.num_computed

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

    def chunk(self, count: int) -> SeqChunk:
        """Return the next `count` tokens as the executor takes them."""
        assert self.row is not None
        start, end = self.num_computed, self.num_computed + count
        draws = end == len(self.tokens) < self.limit
        return SeqChunk(
            row=self.row,
            token_ids=tuple(self.tokens[start:end]),
            start=start,
            pages=self.pages,
            samples=(self._sample(),) if draws else (),
            scoring=self._scoring(start, end),
        )

    def _sample(self) -> SampleSpec:
        request, sampling = self.request, self.request.sampling
        repeats = sampling.repetition_penalty != 1.0
        penalized = repeats or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        early = self.num_outputs < sampling.min_new_tokens
        return SampleSpec(
            temperature=0.0 if sampling.temperature < _GREEDY_BELOW else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple(sampling.logit_bias.items()),
            seed=self._seed,
            position=self.num_outputs,
            prompt_ids=request.prompt_ids if repeats else (),
            output_ids=self.output_ids if penalized else (),
            banned_ids=tuple(sorted(self.end_ids)) if early else (),
            top_logprobs=request.top_logprobs if request.return_logprobs else -1,
            logprob_ids=request.logprob_ids if request.return_logprobs else (),
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
