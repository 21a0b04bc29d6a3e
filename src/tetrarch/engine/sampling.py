# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as a client sends them: read, checked, completed.

One rule per key. A wrong value is named together with its bound; a key that does not exist is
refused, because a misspelt one would otherwise change the output in silence.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from tetrarch.core.errors import RequestError
from tetrarch.engine.patterns import defect
from tetrarch.engine.request import SamplingParams

__all__ = ["check_sampling", "parse_sampling"]

MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_PATTERN_BYTES = 256
MAX_OUTPUTS = 1024
MAX_BIAS = 1e30  # a larger one leaves FP32, and would look like a broken model
INT64 = (-(2**63), 2**63 - 1)

_NOT_YET = ("json_schema", "regex", "ebnf", "structural_tag")
_IGNORED = ("custom_params",)
_OPTIONAL = ("max_new_tokens", "sampling_seed", "stream_interval")  # null is a value of its own


def parse_sampling(raw: object, *, vocab_size: int) -> SamplingParams:
    """Read `/generate`'s `sampling_params`: a JSON object, or `None` for all defaults.

    A null means the default, except for the optional keys, where it means "none".

    Raises:
        RequestError: An unknown key, a wrong type or a value out of bounds; `param` is the key.
    """
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise _refusal("sampling_params", raw, "an object")
    values: dict[str, Any] = {}
    for key, value in cast("Mapping[str, Any]", raw).items():
        if (rule := _RULES.get(key)) is None:
            _refuse_name(key, value)
        elif value is not None or key in _OPTIONAL:
            values[key] = rule(key, value)
    params = SamplingParams(**values)
    _check_together(params, vocab_size)
    return params


def check_sampling(params: SamplingParams, *, vocab_size: int) -> SamplingParams:
    """Check parameters that a program built, and complete them (`stop="x"` becomes `("x",)`).

    Raises:
        RequestError: As in `parse_sampling`.
    """
    return parse_sampling(msgspec.structs.asdict(params), vocab_size=vocab_size)


def _check_together(params: SamplingParams, vocab_size: int) -> None:
    """Bounds that involve two keys, or the model."""
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise _refusal(
            "min_new_tokens",
            params.min_new_tokens,
            f"at most max_new_tokens={params.max_new_tokens}",
        )
    for key, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise _refusal(key, token_id, f"token ids from 0 to {vocab_size - 1}")


def _refuse_name(key: str, value: object) -> None:
    if key in _IGNORED or (key in _NOT_YET and value is None):
        return
    if key in _NOT_YET:
        raise RequestError(
            f"sampling parameter {key!r} is not supported yet",
            why="this server does not constrain outputs to a grammar",
            fix=f"leave {key} out, or send null",
            param=key,
        )
    close = difflib.get_close_matches(key, _RULES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise RequestError(
        f"unknown sampling parameter {key!r}",
        why="a misspelt name would silently leave its default in force",
        fix=f"{hint}accepted names: {', '.join(sorted((*_RULES, *_NOT_YET, *_IGNORED)))}",
        param=key,
    )


def _refusal(key: str, value: object, bound: str) -> RequestError:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return RequestError(
        f"{key} must be {bound}, got {shown if len(shown) <= 80 else shown[:77] + '...'}",
        why="the value is of another type, or out of bounds",
        fix=f"send {key} as {bound}",
        param=key,
    )


_Rule = Callable[[str, Any], Any]


def _integer(low: int, high: int = INT64[1], *, other: int | None = None) -> _Rule:
    """An int from `low` to `high`, or exactly `other`."""
    upper = "" if high == INT64[1] else f" and at most {high}"
    bound = f"an integer of at least {low}{upper}" + ("" if other is None else f", or {other}")
    bound = "a 64-bit integer" if (low, high) == INT64 else bound

    def read(key: str, value: object) -> int | None:
        if value is None:
            return None
        if type(value) is not int or not (low <= value <= high or value == other):
            raise _refusal(key, value, bound)
        return value

    return read


def _number(low: float, high: float = math.inf, *, above: bool = False) -> _Rule:
    """A finite float from `low` (exclusive with `above`) to `high`."""
    bound = f"a number {'above' if above else 'of at least'} {low:g}"
    bound += "" if high == math.inf else f" and at most {high:g}"

    def read(key: str, value: object) -> float:
        number = _finite(value)
        if number is None or not low <= number <= high or (above and number == low):
            raise _refusal(key, value, bound)
        return number

    return read


def _finite(value: object) -> float | None:
    if type(value) is int:
        return float(value) if abs(value) < 2**1000 else None  # float() of a larger int raises
    return value if type(value) is float and math.isfinite(value) else None


def _flag(key: str, value: object) -> bool:
    if type(value) is not bool:
        raise _refusal(key, value, "true or false")
    return value


def _items(key: str, value: object, bound: str) -> list[Any]:
    if not isinstance(value, list | tuple) or len(cast("list[Any]", value)) > MAX_STOPS:
        raise _refusal(key, value, bound)
    return list(cast("list[Any]", value))


def _stops(key: str, value: object) -> tuple[str, ...]:
    bound = f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
    items = [value] if isinstance(value, str) else _items(key, value, bound)
    if any(not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARS for item in items):
        raise _refusal(key, value, bound)
    return tuple(items)


def _patterns(key: str, value: object) -> tuple[str, ...]:
    bound = f"at most {MAX_STOPS} regular expressions of 1 to {MAX_PATTERN_BYTES} bytes"
    items = [value] if isinstance(value, str) else _items(key, value, bound)
    for item in items:
        if (
            not isinstance(item, str)
            or not 0 < len(item.encode(errors="replace")) <= MAX_PATTERN_BYTES
        ):
            raise _refusal(key, value, bound)
        if why := defect(item):
            raise RequestError(
                f"{key} holds {item!r:.80}, which cannot end a text",
                why=why,
                fix="send a regular expression as Python's re has them",
                param=key,
            )
    return tuple(items)


def _stop_ids(key: str, value: object) -> tuple[int, ...]:
    bound = f"a list of at most {MAX_STOPS} token ids"
    items = [value] if type(value) is int else _items(key, value, bound)
    if any(type(item) is not int for item in items):
        raise _refusal(key, value, bound)
    return tuple(items)


def _bias(key: str, value: object) -> dict[int, float]:
    bound = f"an object of finite numbers keyed by token id, at most {MAX_BIAS:g} in size"
    if not isinstance(value, Mapping):
        raise _refusal(key, value, bound)
    bias: dict[int, float] = {}
    for name, amount in cast("Mapping[Any, Any]", value).items():
        number = _finite(amount)
        digits = str(name)  # JSON has no integer keys
        if number is None or abs(number) > MAX_BIAS:
            raise _refusal(key, {name: amount}, bound)
        if isinstance(name, bool) or not digits.isdecimal() or len(digits) > 18:
            raise _refusal(key, {name: amount}, bound)
        bias[int(digits)] = number
    return bias


_RULES: dict[str, _Rule] = {
    "max_new_tokens": _integer(0),
    "min_new_tokens": _integer(0),
    "stop": _stops,
    "stop_regex": _patterns,
    "stop_token_ids": _stop_ids,
    "temperature": _number(0.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _integer(1, other=-1),
    "min_p": _number(0.0, 1.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 2.0, above=True),
    "n": _integer(1, MAX_OUTPUTS),
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "no_stop_trim": _flag,
    "logit_bias": _bias,
    "sampling_seed": _integer(*INT64),
    "stream_interval": _integer(1),
}
