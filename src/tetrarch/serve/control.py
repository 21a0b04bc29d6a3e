# SPDX-License-Identifier: Apache-2.0
"""What one client does to all: abort, pause, continue, flush."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import Continue, Pause, PauseMode
from tetrarch.engine.messages import Flush
from tetrarch.serve.body import json_response, read_body, read_control
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Ignored, Meta
from tetrarch.serve.reply import ask, reply_response

__all__ = [
    "AbortBody",
    "ContinueBody",
    "PauseBody",
    "abort_request",
    "continue_generation",
    "flush_cache",
    "pause_generation",
]

MAX_FLUSH_WAIT_S = 3600.0
_STATUS = {True: {"status": "ok"}, False: {"status": "error"}}


class AbortBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /abort_request`."""

    rid: Annotated[str | None, Meta(description="Id of a request or of one of its outputs.")] = None
    prefix: Annotated[bool | None, Meta(description="Every id that starts with rid.")] = None
    abort_all: Annotated[bool | None, Meta(description="All requests.")] = None


class PauseBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /pause_generation`."""

    mode: Annotated[
        PauseMode | None,
        Meta(
            description="abort (default) ends all requests; retract sets them back to wait, with "
            "the tokens they have; in_place keeps their keys and values, too."
        ),
    ] = None


class ContinueBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /continue_generation`."""

    torch_empty_cache: Ignored = None


async def abort_request(door: Door, http: Request) -> Response:
    """End requests; their clients get 200 with the text so far. An unknown id is no error."""
    body = await read_body(http, AbortBody)
    count = 0
    if body.rid or body.abort_all:
        count = await door.client.abort(
            body.rid or "", prefix=bool(body.prefix), everything=bool(body.abort_all)
        )
    return json_response({"aborted": count})


async def pause_generation(door: Door, http: Request) -> Response:
    """Stop computing; answers once it has stopped. Requests that arrive meanwhile wait."""
    body = await read_control(http, PauseBody)
    reply = await door.client.call(partial(Pause, mode=body.mode or "abort"))
    return reply_response(reply, _STATUS[reply.ok])


async def continue_generation(door: Door, http: Request) -> Response:
    """Compute again; nothing happens where nothing is paused."""
    await read_control(http, ContinueBody)
    reply = await ask(door, Continue)
    return reply_response(reply, _STATUS[reply.ok])


async def flush_cache(door: Door, http: Request) -> Response:
    """Empty the prefix cache: 200, or 400 while requests run; `?timeout=` seconds waits.

    The answer is text, or JSON for `Accept: application/json`.
    """
    timeout = _seconds(http.query_params.get("timeout"))
    reply = await ask(door, partial(Flush, timeout=timeout))
    message = reply.message or "Cache flushed."
    status = 200 if reply.ok else max(reply.status, 400)
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
