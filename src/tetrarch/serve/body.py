# SPDX-License-Identifier: Apache-2.0
"""JSON in and out. In strictly: a typed struct, or a 400 that names the key."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.serve.choices import choices_at
from tetrarch.serve.fields import refuse_later

__all__ = ["json_response", "read_body", "read_control"]

_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
_LONG_DIGITS = re.compile(rb"[0-9]{19}")
_SEARCHED = 1 << 20  # bytes; of 200 MB in one string, a search takes 3 s
_KEY = re.compile(r"missing required field `([^`]+)`$|`\$\.([^`.\[]+)[^`]*`$")

T = TypeVar("T")


async def read_body(request: Request, kind: type[T], *, later: frozenset[str] = frozenset()) -> T:
    """Read the body of `request` as a `kind`.

    A missing body means `{}`; unknown keys are ignored. On `/v1/*` the content type must be
    `application/json` (parameters allowed).

    Args:
        request: Its path decides about the content type.
        kind: A msgspec struct.
        later: Keys that are refused unless their value asks for nothing.

    Raises:
        RequestError: Wrong content type, not JSON, an integer beyond 64 bits, a wrong type.
    """
    if request.url.path.startswith("/v1/"):
        _check_content_type(request.headers.get("content-type", ""))
    content = await request.body()
    value = _decode(content) if content.strip() else {}
    if isinstance(value, dict):
        refuse_later(cast("dict[str, Any]", value), later)
    return _convert(value, kind)


async def read_control(request: Request, kind: type[T]) -> T:
    """Read the body of a control endpoint, and what its query string adds to it.

    With a query, numbers and booleans may be text: `?tags=weights&wait_s=5`.

    Args:
        request: GET or POST.
        kind: A msgspec struct.

    Raises:
        RequestError: Not JSON, an integer beyond 64 bits, a wrong type.
    """
    query = request.query_params
    if not query:
        return await read_body(request, kind)
    content = await request.body()
    value = _decode(content) if content.strip() else {}
    if isinstance(value, dict):
        value = {**query, **cast("dict[str, Any]", value)}
    read = _convert(value, kind, strict=False)
    _check_integers(msgspec.to_builtins(read))
    return read


def _check_content_type(value: str) -> None:
    if value.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"the content type is {value!r}" if value else "the content type is missing",
            why="this endpoint reads JSON only",
            fix="send the header Content-Type: application/json",
        )


def _decode(content: bytes) -> Any:
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "the body is not valid JSON",
            why=str(error),
            fix="send one JSON object in UTF-8; NaN and Infinity are not JSON",
        ) from error
    if len(content) > _SEARCHED or _LONG_DIGITS.search(content):
        _check_integers(value)
    return value


def _check_integers(value: Any) -> None:
    if _has_long_integer(value):
        raise RequestError(
            "the request holds an integer of more than 64 bits",
            why="integers are read as 64-bit numbers",
            fix="send a smaller number",
        )


def _has_long_integer(value: Any) -> bool:
    # Iterative: the decoder accepts nesting that is deeper than our own stack allows.
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, int) and not _SMALLEST <= item <= _LARGEST:
            return True
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return False


def _convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        key = _KEY.search(str(error))
        name = None if key is None else key[1] or key[2]
        if choices := choices_at(kind, str(error)):
            what, fix = f"{name} is none of its values", f"send {choices}"
        else:
            what = f"{name or 'the body'} is missing or of the wrong type"
            fix = "see docs/reference/http.md for the type of every field"
        raise RequestError(what, why=str(error), fix=fix, param=name) from error


def json_response(value: Any, *, status: int = 200) -> Response:
    """Return anything that msgspec encodes as a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
