# SPDX-License-Identifier: Apache-2.0
"""Where the deltas of one HTTP request wait for its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tetrarch.core.errors import TetrarchError
from tetrarch.engine.request import Delta

__all__ = ["Mailbox"]


class Mailbox:
    """What the engine says about the outputs of one HTTP request."""

    def __init__(self, rids: Sequence[str], release: Callable[[Mailbox], None]) -> None:
        self.open = set(rids)
        self._release = release
        self._is_closed = False
        self._deltas: list[Delta] = []
        self._failure: TetrarchError | None = None
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Deliver."""
        if delta.finish is not None:
            self.open.discard(delta.rid)
        self._deltas.append(delta)
        self._news.set()

    def fail(self, error: TetrarchError) -> None:
        """Make `take` raise, once what has arrived is taken."""
        self._failure = error
        self._news.set()

    async def take(self) -> list[Delta]:
        """Wait for news and take all of it, so that a slow reader gets fewer, larger pieces.

        Raises:
            TetrarchError: What `fail` was given.
        """
        while not self._deltas:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self) -> None:
        """Stop caring: outputs that have not finished are aborted. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._release(self)
