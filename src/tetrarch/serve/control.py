# SPDX-License-Identifier: Apache-2.0
"""Control endpoints: what one client does to all."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.messages import Flush
from tetrarch.serve.body import json_response, read_body
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Meta

__all__ = ["AbortBody", "abort_request", "flush_cache"]

MAX_FLUSH_WAIT_S = 3600.0


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /abort_request`."""

    rid: Annotated[str | None, Meta(description="Id of a request or of one of its outputs.")] = None
    prefix: Annotated[bool | None, Meta(description="Every id that starts with rid.")] = None
    abort_all: Annotated[bool | None, Meta(description="All requests.")] = None


async def abort_request(door: Door, http: Request) -> Response:
    """End requests; their clients get 200 with the text so far. An unknown id is no error."""
    body = await read_body(http, AbortBody)
    count = 0
    if body.rid or body.abort_all:
        count = await door.client.abort(
            body.rid or "", prefix=bool(body.prefix), everything=bool(body.abort_all)
        )
    return json_response({"aborted": count})


async def flush_cache(door: Door, http: Request) -> Response:
    """Empty the prefix cache: 200, or 400 while requests run; `?timeout=` seconds waits.

    The answer is text, or JSON for `Accept: application/json`.
    """
    timeout = _seconds(http.query_params.get("timeout"))
    reply = await door.client.call(partial(Flush, timeout=timeout))
    message = reply.message or "Cache flushed."
    status = 200 if reply.ok else 400
    if "application/json" in http.headers.get("accept", ""):
        return json_response({"success": reply.ok, "message": message}, status=status)
    return PlainTextResponse(f"{message}\n", status)


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_FLUSH_WAIT_S:  # false for NaN
        raise RequestError(
            f"timeout must be a number of seconds from 0 to {MAX_FLUSH_WAIT_S:.0f}, got {text!r}",
            why="it says how long to wait for running requests",
            fix="send ?timeout=60, or leave it out",
            param="timeout",
        )
    return seconds
