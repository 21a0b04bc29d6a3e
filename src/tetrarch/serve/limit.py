# SPDX-License-Identifier: Apache-2.0
"""A bound on request bodies, so that no client fills the server's memory."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tetrarch.serve.errors import Failure, HttpError, failure_response

__all__ = ["BodyLimit"]


class BodyLimit:
    """ASGI middleware that refuses a body of more than `max_bytes` with 413.

    By its declared length before a byte of it is read, else as soon as too many have come. uvicorn
    drops what the client still sends, so a client that reads only afterwards gets its answer too.

    Args:
        app: What comes next.
        max_bytes: Of most endpoints.
        own: Of the paths that take more.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, own: Mapping[str, int]) -> None:
        self._app, self._max_bytes, self._own = app, max_bytes, own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        path = scope.get("path", "")
        bound = max(self._max_bytes, self._own.get(path, 0))
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared(scope) > bound:
            await failure_response(_failure(bound), path=path)(scope, receive, send)
        else:
            await self._app(scope, _counted(receive, bound), send)


def _counted(receive: Receive, bound: int) -> Receive:
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > bound:
            raise HttpError(_failure(bound))
        return message

    return counted


def _failure(bound: int) -> Failure:
    message = (
        f"the body is larger than {bound} bytes; send several smaller requests, or start the "
        "server with a larger --max-body-bytes"
    )
    return Failure(status=413, message=message)


def _declared(scope: Scope) -> int:
    """Return the length that the headers declare; h11 has checked that it is a number."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
