# SPDX-License-Identifier: Apache-2.0
"""What a program passes to `LLM.generate`: spread over prompts, and checked before it is sent.

Python enforces no annotation, and the engine cannot answer a message that it cannot read: the
call would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import msgspec

from tetrarch.core.errors import RequestError
from tetrarch.engine.messages import decode_inbound, encode
from tetrarch.engine.request import GenerateRequest, SamplingParams

__all__ = ["Logprobs", "check_logprobs", "check_readable", "list_prompts", "list_sampling"]

_PROMPTS = "a text, a list of token ids, or a list of either"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What log-probabilities `generate` reports, beside the sampled tokens' own.

    Attributes:
        start: First prompt position that is scored too; -1: outputs only.
        top: Alternatives at every position.
        token_ids: Further ids at every position.
    """

    start: int = -1
    top: int = 0
    token_ids: tuple[int, ...] = ()


def list_prompts(prompts: object) -> list[str | tuple[int, ...]]:
    """Return a list of prompts; one text or one list of ids is one prompt.

    Raises:
        RequestError: They are something else; `param` is `prompts`.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = _items(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [cast("tuple[int, ...]", listed)]
    return [
        item if isinstance(item, str) else cast("tuple[int, ...]", _items(item)) for item in listed
    ]


def list_sampling(sampling: object, count: int) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts; `None` means all defaults.

    Raises:
        RequestError: They are no parameters, or not as many; `param` is `sampling`.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    listed = cast("list[object]", list(sampling)) if isinstance(sampling, Sequence) else [sampling]
    each = [item for item in listed if isinstance(item, SamplingParams)]
    if len(each) < len(listed):
        raise _refusal("sampling", sampling, "SamplingParams, or a list of them")
    if len(each) != count:
        raise RequestError(
            f"{len(each)} sampling parameters for {count} prompts",
            why="each prompt takes its own, or all share one",
            fix="pass one SamplingParams, or as many as there are prompts",
            param="sampling",
        )
    return each


def check_logprobs(value: object) -> Logprobs:
    """Return what log-probabilities to report; `None` stands for the defaults.

    Raises:
        RequestError: It is something else; `param` is `logprobs`.
    """
    if value is None:
        return Logprobs()
    if not isinstance(value, Logprobs):
        names = ", ".join(field.name for field in fields(Logprobs))
        raise _refusal("logprobs", value, f"a Logprobs, which takes {names}")
    return value


def check_readable(request: GenerateRequest) -> GenerateRequest:
    """Return the request if the engine process can read it.

    Raises:
        RequestError: A value is of a type or size that no message holds, such as NumPy's.
    """
    try:
        if min(request.prompt_ids, default=0) < 0:
            raise OverflowError("a token id is negative")
        decode_inbound(encode(request))
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise RequestError(
            "a prompt or parameter is of the wrong type",
            why=str(error),
            fix="pass token ids as plain integers (of numpy, torch: .tolist()), text as Unicode",
        ) from error
    return request


def _items(value: object) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | Mapping):
        raise _refusal("prompts", value, _PROMPTS)
    return tuple(cast("Iterable[object]", value))


def _refusal(param: str, value: object, bound: str) -> RequestError:
    return RequestError(
        f"{param} must be {bound}, got {type(value).__name__}",
        why="the value is of another type",
        fix=f"pass {bound}",
        param=param,
    )
