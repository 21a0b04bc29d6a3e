# SPDX-License-Identifier: Apache-2.0
"""What the engine answers to a control message, as an HTTP response.

`success` and `message` are what trainers read; a refusal also has the `error` object of every
other endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from tetrarch.engine.messages import ControlReply, Inbound
from tetrarch.serve.body import json_response
from tetrarch.serve.door import Door
from tetrarch.serve.errors import Failure, busy_headers, error_object
from tetrarch.serve.metrics import Metrics

__all__ = ["ask", "relay", "relay_update", "reply_response", "time_update"]


async def ask(door: Door, make: Callable[..., Inbound]) -> ControlReply:
    """Send a control message; where its answer tells of an update that it has ended, time that.

    Args and errors as of `relay`.
    """
    reply = await door.client.call(make)
    time_update(door.metrics, reply)
    return reply


def time_update(metrics: Metrics, reply: ControlReply) -> None:
    """Time the update that a reply says has ended, if it says so of one."""
    if "seconds" in reply.payload:
        source, seconds = reply.payload["source"], reply.payload["seconds"]
        metrics.observe_update(source, ok=True, seconds=seconds)


async def relay(door: Door, make: Callable[..., Inbound]) -> Response:
    """Send a control message, and answer with what the engine says to it.

    Args:
        door: The server.
        make: Builds the message, given its `ticket`.

    Raises:
        EngineDead: There is no engine, or it died before it answered.
    """
    return reply_response(await ask(door, make))


def reply_response(reply: ControlReply, extra: Mapping[str, Any] | None = None) -> Response:
    """Return an answer with the reply's payload; `extra` keys come on top of it."""
    body = {"success": reply.ok, "message": reply.message, **reply.payload, **(extra or {})}
    if reply.ok:
        return json_response(body)
    status = max(reply.status, 400)
    failure = Failure(status=status, message=reply.message, kind=reply.code)
    body["error"] = error_object(failure, flat=False)
    response = json_response(body, status=status)
    response.headers.update(busy_headers(status))
    return response


async def relay_update(door: Door, make: Callable[..., Inbound], *, source: str) -> Response:
    """Relay a call of an update, and count it also where it fails, or does not end the update.

    Args:
        door: The server.
        make: Builds the message, given its `ticket`.
        source: Where the weights come from, unless the answer says so.

    Raises:
        EngineDead: There is no engine, or it died before it answered.
    """
    reply = await ask(door, make)
    if "seconds" not in reply.payload:
        door.metrics.observe_update(source, ok=reply.ok, seconds=None)
    return reply_response(reply)
