# SPDX-License-Identifier: Apache-2.0
"""One run of a server, from the first health check to the last answer.

The server answers while the engine loads (health says 503), and keeps answering 503 when the
engine has died: an operator sees what happened, and clients get an error instead of a refused
connection. Restarting is the supervisor's business.

The first SIGINT or SIGTERM lets running requests finish, for a while. A second one ends them with
an error and the engine by force. Until the engine is gone no signal ends this process, which would
leave the engine behind.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager

import uvicorn

from tetrarch.core.errors import EngineDead, TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.core.progress import Progress
from tetrarch.engine.connection import AsyncConnection
from tetrarch.engine.process import EngineProcess
from tetrarch.serve.app import build_app
from tetrarch.serve.door import Door

__all__ = ["BACKLOG", "Life"]

BACKLOG = 4096
GRACE_S = 10.0
"""Requests that run when the server is told to stop have so long; then they are aborted, and
their clients get what there is."""

_ANSWER_S = 1.0  # the engine's time to confirm that, and a client's to read its error
_KEEP_ALIVE_S = 75
_log = get_logger(__name__)


class Life:
    """Holds what lives as long as the server does; `run` is all of it.

    Attributes:
        was_interrupted: Ctrl-C came before the engine was ready.
    """

    def __init__(
        self,
        door: Door,
        engine: EngineProcess,
        progress: Progress,
        announce: Callable[[str], None],
    ) -> None:
        self._door, self._engine = door, engine
        self._progress, self._announce = progress, announce
        self._failure: TetrarchError | None = None
        self._num_signals = 0
        self.was_interrupted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = _Server(
            uvicorn.Config(
                build_app(door),
                log_config=None,
                log_level="info" if door.plan.serve.log_level == "debug" else "warning",
                access_log=door.plan.serve.log_level == "debug",
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    async def run(self, listener: socket.socket) -> None:
        """Serve on `listener` until a signal, or until the engine fails to start."""
        with _signals(self._on_signal):
            follow = asyncio.create_task(self._follow_engine())
            await self._server.serve(sockets=[listener])
            for task in self._tasks:
                task.cancel()
            await asyncio.to_thread(self._engine.close)
            await follow  # ends with the engine
        if self._failure is not None:
            raise self._failure

    async def _follow_engine(self) -> None:
        client = self._door.client
        try:
            ready = await asyncio.to_thread(self._engine.wait_ready, self._progress)
        except TetrarchError as error:
            self._failure = None if self._server.should_exit else error
            self._server.should_exit = True
            self._start(self._end_at_once())
            return
        self._door.metrics.observe_ready(load_s=ready.payload["load_report"]["seconds"])
        connection = AsyncConnection(self._engine, on_death=self._on_death)
        if not self._server.should_exit:
            self._announce(self._ready_line())
        try:
            await client.run(connection, ready)
        finally:
            connection.close()

    def _on_death(self, error: EngineDead) -> None:
        self._door.client.die(error)
        if not self._server.should_exit:
            self._failure = error
            _log.error("%s\nHealth checks fail and requests are refused from now on.", error)

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        self.was_interrupted |= number is signal.SIGINT and self._door.client.ready is None
        if self._num_signals > 1:
            self._start(self._end_at_once())
            return
        self._server.should_exit = True
        client = self._door.client
        client.stop()
        if client.num_pending:
            self._announce(
                f"Stopping. Waiting up to {GRACE_S:g} s for running outputs "
                f"({client.num_pending}); Ctrl-C again stops at once"
            )
        self._start(self._end_after_grace())

    async def _end_after_grace(self) -> None:
        """Give what runs its time, then abort it; the clients get what there is."""
        await asyncio.sleep(GRACE_S)
        self._door.client.abort_all_now()
        await asyncio.sleep(_ANSWER_S)
        await self._end_at_once()

    async def _end_at_once(self) -> None:
        """Fail what still runs, then close connections whose clients do not read."""
        self._door.client.die(
            EngineDead(
                "the engine is stopping",
                why="the server was told to stop, and this request had not finished",
                fix="retry when GET /health answers 200",
            )
        )
        self._engine.kill()
        await asyncio.sleep(_ANSWER_S)
        self._server.force_exit = True

    def _start(self, work: Coroutine[object, None, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    def _ready_line(self) -> str:
        serve = self._door.plan.serve
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(serve.host, serve.host)
        url = f"http://{host}:{serve.port}"
        key = " -H 'Authorization: Bearer <key>'" if serve.api_key else ""
        body = '{"messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
        return (
            f"Serving {self._door.plan.model.served_name} on {url}\n"
            f"  try  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
            f"-d '{body}'"
        )


class _Server(uvicorn.Server):
    """uvicorn, which leaves signals to us: its own handlers go before the engine has."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextmanager
def _signals(on_signal: Callable[[signal.Signals], None]) -> Generator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
