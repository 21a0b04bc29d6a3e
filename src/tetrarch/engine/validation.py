# SPDX-License-Identifier: Apache-2.0
"""Which requests this engine can serve, checked before they queue."""

from __future__ import annotations

import msgspec

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import GenerateRequest
from tetrarch.engine.sampling import check_sampling

__all__ = ["Limits", "check_request"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a request.

    Attributes:
        max_tokens: Prompt and output together: the context, or the KV pool where that is less.
        context_len: The model's own limit, for the message.
        has_text: Whether there is a tokenizer to find stop strings with.
    """

    vocab_size: int
    context_len: int
    max_tokens: int
    has_text: bool


def check_request(request: GenerateRequest, limits: Limits) -> GenerateRequest:
    """Return the request with its sampling parameters completed.

    Raises:
        RequestError: It can never be served; `param` is the field at fault.
    """
    sampling = check_sampling(request.sampling, vocab_size=limits.vocab_size)
    if sampling.n != 1:
        raise _refusal("n", sampling.n, "1 here: outputs are fanned out by the caller")
    for name, stops in (("stop", sampling.stop), ("stop_regex", sampling.stop_regex)):
        if stops and not limits.has_text:
            raise _refusal(name, stops, "empty: this server has no tokenizer")
    _check_prompt(request, limits, draws=sampling.max_new_tokens != 0)
    if not -1 <= request.logprob_start <= len(request.prompt_ids):
        bound = f"-1, or a position up to the prompt's length {len(request.prompt_ids)}"
        raise _refusal("logprob_start_len", request.logprob_start, bound)
    if not 0 <= request.top_logprobs <= limits.vocab_size:
        bound = f"from 0 to the vocabulary's size {limits.vocab_size}"
        raise _refusal("top_logprobs_num", request.top_logprobs, bound)
    _check_ids("token_ids_logprob", request.logprob_ids, limits)
    return msgspec.structs.replace(request, sampling=sampling)


def _check_prompt(request: GenerateRequest, limits: Limits, *, draws: bool) -> None:
    length = len(request.prompt_ids)
    if not length:
        raise _refusal("input_ids", "nothing", "at least one token")
    _check_ids("input_ids", request.prompt_ids, limits)
    room = limits.max_tokens - draws
    if length > room:
        short = limits.max_tokens < limits.context_len
        pool = f", and the KV cache {limits.max_tokens}" if short else ""
        raise RequestError(
            f"the prompt has {length} tokens, and at most {room} are served",
            why=f"the context holds {limits.context_len} tokens{pool}"
            + (", one of them generated" if draws else ""),
            fix="shorten the prompt"
            + (", or start the server with --allow-auto-truncate" if draws else ""),
            param="input_ids",
        )


def _check_ids(param: str, ids: tuple[int, ...], limits: Limits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise _refusal(param, bad, f"token ids from 0 to {limits.vocab_size - 1}")


def _refusal(param: str, value: object, bound: str) -> RequestError:
    return RequestError(
        f"{param} must be {bound}, got {value!r}",
        why="the value is out of bounds",
        fix=f"send {param} within them",
        param=param,
    )
