# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: `data: <one-line JSON>`, a blank line, and `data: [DONE]` last.

No comments, no pings and no `event:` lines: common clients feed every non-empty line to a JSON
parser. A failure after the 200 status line is an event with a top-level `error`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tetrarch.core.errors import TetrarchError
from tetrarch.serve.errors import error_object, failure_of

__all__ = ["EventStream", "event"]

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Frame one JSON-able value."""
    return b"data: %b\n\n" % _encode(value)


class EventStream(Response):
    """Send events as they come. Build it with `open`, which awaits the first."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], *, flat: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._rest, self._flat = first, rest, flat

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes, None], *, flat: bool) -> EventStream:
        """Await the first event, so that a refusal is still an HTTP status.

        Args:
            events: Framed events; closed by the response in any case.
            flat: Report failures in the OpenAI shape.
        """
        return cls(await anext(events), events, flat=flat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the status line, every event, and the end mark."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_part(self._first))
            async for data in self._rest:
                await send(_part(data))
        except TetrarchError as error:
            inner = error_object(failure_of(error), flat=self._flat)
            await send(_part(event({"error": inner})))
        finally:
            await self._rest.aclose()
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
