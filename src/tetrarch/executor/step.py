# SPDX-License-Identifier: Apache-2.0
"""A step in, a result out: plain host data between the scheduler and the device side.

The executor does not know requests. Everything here pickles, so that the same step can be sent
to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Phase",
    "PromptScoring",
    "SampleSpec",
    "SeqChunk",
    "SeqResult",
    "Step",
    "StepResult",
    "TokenLogprob",
]


class Phase(StrEnum):
    """What the step is, for graph choice; a prefill step may carry decodes."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Logprobs of prompt tokens that this chunk predicts.

    Row `first + i` of the chunk predicts `targets[i]`.
    """

    first: int
    targets: tuple[int, ...]
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqChunk:
    """The tokens of one sequence that this step computes.

    Attributes:
        row: Stable index of the sequence among the running ones.
        token_ids: New tokens, at positions `start`, `start + 1`, ….
        start: Number of tokens of the sequence already in the KV pool.
        pages: Page ids that hold positions 0 to `start + len(token_ids) - 1`, in order.
        sample: How to draw the next token from the last row; `None` while the prompt goes on.
        scoring: Prompt logprobs to compute; `None` when none are wanted.
    """

    row: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sample: SampleSpec | None
    scoring: PromptScoring | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward of one rank."""

    phase: Phase
    seqs: tuple[SeqChunk, ...]
    rank_tokens: tuple[int, ...]  # tokens of every data-parallel rank in this step

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return sum(len(seq.token_ids) for seq in self.seqs)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and of others in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first
    picked: tuple[tuple[int, float], ...] = ()  # (id, logprob), in the order asked


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqResult:
    """What one sequence of the step yields, in step order.

    Attributes:
        token_ids: New tokens: none while the prompt goes on, one, or several when speculating.
        logprobs: One per token id when asked for, else empty.
        prompt_logprobs: One per scoring target.
        failed: The logits were not finite; the request must end with an error.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step, sequence by sequence."""

    seqs: tuple[SeqResult, ...] = field(default=())
