# SPDX-License-Identifier: Apache-2.0
"""A door's end of the engine process: send messages, receive batches, learn of its death."""

from __future__ import annotations

from collections.abc import Callable

from tetrarch.core.errors import EngineDead
from tetrarch.engine.messages import Inbound, Outbound
from tetrarch.engine.process import EngineProcess

__all__ = ["AsyncConnection", "Connection"]


class Connection:
    """For a program without an event loop."""

    def __init__(self, process: EngineProcess) -> None: ...

    def send(self, message: Inbound) -> None:
        """Send; never blocks.

        Raises:
            EngineDead: The process is gone.
        """
        raise NotImplementedError

    def receive(self, timeout: float | None = None) -> list[Outbound]:
        """Return the next batch; empty after `timeout` seconds.

        Raises:
            EngineDead: The process is gone, and all it had sent has been received.
        """
        raise NotImplementedError


class AsyncConnection:
    """For asyncio; make it inside the running loop."""

    def __init__(
        self, process: EngineProcess, *, on_death: Callable[[EngineDead], None] | None = None
    ) -> None:
        """`on_death` is called once, in the loop, at once when the process ends."""

    def send(self, message: Inbound) -> None:
        """Send; never blocks (not a coroutine).

        Raises:
            EngineDead: The process is gone.
        """
        raise NotImplementedError

    async def receive(self) -> list[Outbound]:
        """Return the next batch.

        Raises:
            EngineDead: The process is gone, and all it had sent has been received.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop watching."""
        raise NotImplementedError
