# SPDX-License-Identifier: Apache-2.0
"""A request, how it is sampled, and what comes back piece by piece.

All three cross the border between the engine process and the doors, so they are msgspec structs.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tetrarch.engine.acceptance import Acceptance
from tetrarch.executor.step import TokenLogprob

__all__ = [
    "Delta",
    "FinishReason",
    "GenerateRequest",
    "SamplingParams",
    "WeightSpan",
    "fan_out",
]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate; the names, defaults and bounds of `/generate`'s `sampling_params`.

    `engine/sampling.py` checks the bounds and reports the offending key.

    Attributes:
        max_new_tokens: 0 runs the prompt only (scoring).
        min_new_tokens: End tokens and stop strings are held back until then.
        stop: Strings that end the text; trimmed from it unless `no_stop_trim`.
        stop_regex: Regular expressions that do the same, at the token that completes a match.
        stop_token_ids: Ids that end the output, besides the model's own end tokens.
        temperature: Below 1e-6 is greedy.
        top_k: -1: all.
        n: Independent outputs for one prompt.
        sampling_seed: Same seed, same prompt, same parameters: same output.
        stream_interval: Tokens a delta gathers before it is sent, the first and the last one
            excepted; `None`: the server's. A caller that does not stream sets it high.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None
    stream_interval: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One output wanted for one prompt; `n > 1` was fanned out before.

    Attributes:
        rid: Unique among live requests.
        return_logprobs: Report the sampled tokens' logprobs.
        logprob_start: First prompt position whose logprob is wanted; -1: outputs only.
        top_logprobs: Alternatives reported beside each logprob.
        logprob_ids: Further ids whose logprob is reported at every position.
        is_probe: A health probe: not counted in metrics.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    return_logprobs: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    is_probe: bool = False


def fan_out(request: GenerateRequest) -> tuple[GenerateRequest, ...]:
    """Split a request for `n` outputs into `n` requests, `rid_0` to `rid_{n - 1}`.

    A seed is counted up, so that the outputs differ and the first equals the one of `n = 1`.
    """
    sampling = request.sampling
    if sampling.n == 1:
        return (request,)
    return tuple(
        msgspec.structs.replace(
            request,
            rid=f"{request.rid}_{index}",
            sampling=msgspec.structs.replace(
                sampling, n=1, sampling_seed=_count_up(sampling.sampling_seed, index)
            ),
        )
        for index in range(sampling.n)
    )


def _count_up(seed: int | None, index: int) -> int | None:
    """Add within int64."""
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended.

    Attributes:
        kind: `stop` with `matched`, `length` with `length`, `abort` with `message`.
        matched: The stop string, the regular expression or the token id.
        status: HTTP status of an abort that is an error; `None`: the client asked for it.
        code: Name of the error, such as `nan_logits`.
        param: The field of the request that is at fault.
    """

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status: int | None = None
    code: str | None = None
    param: str | None = None


class WeightSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` (exclusive) were computed under `version`."""

    version: str
    start: int
    end: int


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is new about one request since the last delta.

    Attributes:
        token_ids: New output tokens.
        logprobs: One per new token when asked for.
        prompt_logprobs: All of them, in the first delta after prefill; else empty.
        finish: Set on the last delta.
        num_cached: Prompt tokens found in the prefix cache.
        num_retractions: How often the request was set back.
        versions: Weight versions of all outputs so far, contiguous.
        times: `received`, `scheduled`, `first_token`, `finished` (monotonic seconds); those
            already known.
        acceptance: Of all drafts verified so far; `None` before the first verification.
    """

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    num_cached: int = 0
    num_retractions: int = 0
    versions: tuple[WeightSpan, ...] = ()
    times: dict[str, float] = {}
    acceptance: Acceptance | None = None
