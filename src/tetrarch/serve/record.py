# SPDX-License-Identifier: Apache-2.0
"""What control endpoints were asked and did not do, or did to everybody: a line of the log each.

An update that was done is told by the engine, which also knows of those that no call has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.serve.door import Door
from tetrarch.serve.errors import failure_of

__all__ = ["recorded"]

_log = get_logger(__name__)
_TOLD = frozenset(  # when they succeed: whoever looks for the reason of a silence finds it
    {
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/pause_generation",
        "/continue_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    }
)
Handler = Callable[[Door, Request], Awaitable[Response]]


class _Said(msgspec.Struct):
    message: str = ""


def recorded(path: str, handler: Handler) -> Handler:
    """Return the handler of a control endpoint, whose refusals are logged, and some successes.

    Args:
        path: The endpoint.
        handler: What it does; the response's JSON, or what is raised, has the words.
    """

    async def call(door: Door, request: Request) -> Response:
        try:
            response = await handler(door, request)
        except TetrarchError as error:
            failure = failure_of(error)
            _note(path, failure.status, failure.message)
            raise
        if response.status_code >= 400 or path in _TOLD:
            _note(path, response.status_code, _words(response))
        return response

    return call


def _words(response: Response) -> str:
    body = bytes(response.body)
    if response.media_type != "application/json":
        return body.decode()
    return msgspec.json.decode(body, type=_Said).message


def _note(path: str, status: int, message: str) -> None:
    """Write one line, whatever line breaks a client has put into its names."""
    level = logging.INFO if status < 400 else logging.WARNING
    _log.log(level, "%s: %d %s", path, status, " ".join(message.split()))
