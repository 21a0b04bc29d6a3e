# SPDX-License-Identifier: Apache-2.0
"""A door's end of the engine process: send messages, receive batches, learn of its death.

Nobody waits for a process that is gone: its end is an event of its own, not a missing answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq
import zmq.asyncio

from tetrarch.core.errors import EngineDead
from tetrarch.engine.messages import Inbound, Outbound, decode_outbound, encode

__all__ = ["AsyncConnection", "Connection", "Endpoint"]

_START_AGAIN, _RESTART = "start again: another LLM(...), or the command", "restart the server"
_LAST_WORDS_MS = 100  # what a process sent before it ended may still be on its way


class Endpoint(Protocol):
    """What a connection needs of an `EngineProcess`."""

    @property
    def inbound(self) -> zmq.Socket[bytes]:
        """Where messages to the engine go."""
        ...

    @property
    def outbound(self) -> zmq.Socket[bytes]:
        """Where batches from the engine come from."""
        ...

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        ...

    @property
    def exit_code(self) -> int | None:
        """The return code; `None` while the process runs."""
        ...


class Connection:
    """For a program without an event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._poller = zmq.Poller()
        self._poller.register(endpoint.outbound, zmq.POLLIN)
        self._poller.register(endpoint.sentinel, zmq.POLLIN)

    def send(self, message: Inbound) -> None:
        """Send; never blocks.

        Raises:
            EngineDead: The process is gone.
        """
        _send(self._endpoint, message, fix=_START_AGAIN)

    def receive(self, timeout: float | None = None) -> list[Outbound]:
        """Return the next batch; empty after `timeout` seconds.

        Raises:
            EngineDead: The process is gone, and all it had sent has been received.
        """
        outbound = self._endpoint.outbound
        ready = dict(self._poller.poll(None if timeout is None else int(timeout * 1000)))
        if outbound in ready or (ready and outbound.poll(_LAST_WORDS_MS)):
            return decode_outbound(outbound.recv())
        if ready:
            raise _dead(self._endpoint, fix=_START_AGAIN)
        return []


class AsyncConnection:
    """For asyncio; made inside the running loop."""

    def __init__(
        self, endpoint: Endpoint, *, on_death: Callable[[EngineDead], None] | None = None
    ) -> None:
        """Attach to a process.

        Args:
            endpoint: The process; `wait_ready` may or may not have been called.
            on_death: Called once, in the loop, as soon as the process has ended.
        """
        self._endpoint, self._on_death = endpoint, on_death
        self._outbound = zmq.asyncio.Socket.from_socket(endpoint.outbound)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(endpoint.sentinel, self._end)

    def send(self, message: Inbound) -> None:
        """Send; never blocks, and is no coroutine.

        Raises:
            EngineDead: The process is gone.
        """
        _send(self._endpoint, message, fix=_RESTART)

    async def receive(self) -> list[Outbound]:
        """Return the next batch.

        Raises:
            EngineDead: The process is gone, and all it had sent has been received.
        """
        arriving = asyncio.ensure_future(self._outbound.recv())
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((arriving, ending), return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                await asyncio.wait((arriving,), timeout=_LAST_WORDS_MS / 1000)
            if arriving.done():
                return decode_outbound(arriving.result())
            raise _dead(self._endpoint, fix=_RESTART)
        finally:
            arriving.cancel()
            ending.cancel()

    def close(self) -> None:
        """Stop watching; the process goes on."""
        self._loop.remove_reader(self._endpoint.sentinel)

    def _end(self) -> None:
        self.close()
        self._ended.set()
        if self._on_death is not None:
            self._on_death(_dead(self._endpoint, fix=_RESTART))


def _send(endpoint: Endpoint, message: Inbound, *, fix: str) -> None:
    if endpoint.exit_code is not None:
        raise _dead(endpoint, fix=fix)
    endpoint.inbound.send(encode(message), zmq.NOBLOCK)


def _dead(endpoint: Endpoint, *, fix: str) -> EngineDead:
    code = endpoint.exit_code
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return EngineDead(
        "the engine process is gone",
        why=f"it ended ({how}); its last log lines say more",
        fix=fix,
    )
