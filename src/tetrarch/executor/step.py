# SPDX-License-Identifier: Apache-2.0
"""A step in, a result out: plain host data between the scheduler and the device side.

The executor does not know requests. Everything here pickles, so that the same step can be sent
to other ranks. Structs and not dataclasses, for a step makes hundreds: a frozen dataclass of seven
fields takes forty times as long to make.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

import msgspec

__all__ = [
    "FUTURE",
    "Done",
    "DraftWork",
    "Pending",
    "Phase",
    "PromptScoring",
    "SampleSpec",
    "SeqChunk",
    "SeqResult",
    "Step",
    "StepResult",
    "TokenLogprob",
]


FUTURE: Final = -1
"""A chunk's last token id where the host does not know it yet: what the step launched before drew
for the same row."""


class Phase(StrEnum):
    """What the step is, for graph choice; a prefill step may carry decodes."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    IDLE = "idle"


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw one token.

    Attributes:
        temperature: 0 is greedy.
        seed: Chosen by the engine when the client gave none, so that retraction and restarts of
            a request draw the same tokens.
        position: Index of the token among the request's outputs; with `seed` it fixes the draw.
        prompt_ids: For the repetition penalty; empty when no penalty is set.
        output_ids: For all penalties; empty when no penalty is set.
        banned_ids: Ids that may not be drawn (end tokens before `min_new_tokens`).
        top_logprobs: How many alternatives to report; -1: no logprobs at all.
        logprob_ids: Further ids whose logprob is reported.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    position: int = 0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    top_logprobs: int = -1
    logprob_ids: tuple[int, ...] = ()


class PromptScoring(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of prompt tokens that this chunk predicts.

    Row `first + i` of the chunk predicts `targets[i]`.
    """

    first: int
    targets: tuple[int, ...]
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()


class DraftWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the draft does for one sequence once its tokens are drawn.

    It always reads along: it computes its own keys and values for the rows of the chunk, so that
    it can guess what follows.

    Attributes:
        next_id: The token after the chunk's last, where the prompt goes on; `None`: the one drawn.
        num_drafts: Tokens to propose for the next step; 0: only read along.
    """

    next_id: int | None
    num_drafts: int


class SeqChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one sequence that this step computes.

    Attributes:
        row: Stable index of the sequence among the running ones.
        token_ids: New tokens, at positions `start`, `start + 1`, …; drafts to verify come last.
            The last one may be `FUTURE`.
        start: Number of tokens of the sequence already in the KV pool.
        pages: Page ids that hold positions 0 to `start + len(token_ids) - 1`, in order, and those
            that the draft writes beyond.
        samples: How to draw the next token, after each of the last `len(samples)` rows; empty
            while the prompt goes on. More than one: the tokens of all these rows but the first
            are drafts.
        scoring: Prompt logprobs to compute; `None` when none are wanted.
        draft: `None`: the draft leaves this sequence alone.
    """

    row: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    samples: tuple[SampleSpec, ...] = ()
    scoring: PromptScoring | None = None
    draft: DraftWork | None = None

    @property
    def drafts(self) -> tuple[int, ...]:
        """The tokens to verify."""
        if len(self.samples) < 2:
            return ()
        return self.token_ids[1 - len(self.samples) :]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One forward of one rank."""

    phase: Phase
    seqs: tuple[SeqChunk, ...]
    rank_tokens: tuple[int, ...]  # tokens of every data-parallel rank in this step

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return sum(len(seq.token_ids) for seq in self.seqs)


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log-probability of a token, and of others in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first
    picked: tuple[tuple[int, float], ...] = ()  # (id, logprob), in the order asked


class SeqResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence of the step yields, in step order.

    Attributes:
        token_ids: New tokens: none while the prompt goes on, else the drafts that were right and
            one more.
        logprobs: One per token id when asked for, else empty.
        prompt_logprobs: One per scoring target.
        failed: The logits were not finite; the request must end with an error.
        drafts: What the draft proposes to come after `token_ids`.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    failed: bool = False
    drafts: tuple[int, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """The results of one step, sequence by sequence."""

    seqs: tuple[SeqResult, ...] = ()


class Pending(Protocol):
    """A step that has been launched."""

    def wait(self) -> StepResult:
        """Return what it yields, once that is known; to be called once, in order of launch."""
        ...


class Done(msgspec.Struct, frozen=True):
    """A step whose result is known: the `Pending` of one that nobody need wait for."""

    result: StepResult

    def wait(self) -> StepResult:
        """Return the result."""
        return self.result
