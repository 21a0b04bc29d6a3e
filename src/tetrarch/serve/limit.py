# SPDX-License-Identifier: Apache-2.0
"""A bound on request bodies, so that no client fills the server's memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tetrarch.serve.errors import Failure, HttpError, failure_response

__all__ = ["BodyLimit"]


class BodyLimit:
    """ASGI middleware that refuses a body of more than `max_bytes` with 413.

    By its declared length before a byte of it is read, else as soon as too many have come. uvicorn
    drops what the client still sends, so a client that reads only afterwards gets its answer too.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared(scope) > self._max_bytes:
            await failure_response(self._failure(), path=scope["path"])(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HttpError(self._failure())
            return message

        return counted

    def _failure(self) -> Failure:
        message = (
            f"the body is larger than {self._max_bytes} bytes; send several smaller requests, or "
            "start the server with a larger --max-body-bytes"
        )
        return Failure(status=413, message=message)


def _declared(scope: Scope) -> int:
    """Return the length that the headers declare; h11 has checked that it is a number."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
