# SPDX-License-Identifier: Apache-2.0
"""From a plan to a running server: take the port, start the engine, answer, stop in good order.

The server answers while the engine loads (health says 503), and keeps answering 503 when the
engine has died: an operator sees what happened, and clients get an error instead of a refused
connection. Restarting is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from tetrarch.config.plan import Plan
from tetrarch.core.errors import ConfigError, EngineDead, TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.engine.connection import AsyncConnection
from tetrarch.engine.process import EngineProcess
from tetrarch.engine.text import load_tokenizer
from tetrarch.serve.app import build_app
from tetrarch.serve.client import EngineClient
from tetrarch.serve.defaults import read_chat_defaults
from tetrarch.serve.door import Door
from tetrarch.serve.metrics import Metrics

__all__ = ["bind", "serve"]

GRACE_S = 10
"""Requests that run when the server is told to stop have so long; then they are aborted, and
their clients get what there is."""

_KEEP_ALIVE_S = 75
_BACKLOG = 4096
_log = get_logger(__name__)


def serve(
    plan: Plan,
    *,
    progress: Progress | None = None,
    announce: Callable[[str], None] = _log.info,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        plan: What, how and where.
        progress: Shows how far loading has come.
        announce: Given the ready line: the address, and a command to try.

    Raises:
        ConfigError: The address cannot be had; found out before anything is loaded.
        TetrarchError: What stopped the engine's start.
        EngineDead: The engine died while serving; raised when the server is stopped.
    """
    with bind(plan.serve.host, plan.serve.port) as listener:
        _raise_file_limit()
        host = replace(plan.serve, port=listener.getsockname()[1])  # where it was 0
        door = Door(
            plan=replace(plan, serve=host),
            client=EngineClient(),
            tokenizer=load_tokenizer(
                plan.model.tokenizer_path, chat_template=plan.serve.chat_template
            ),
            metrics=Metrics(plan.model.served_name),
            chat_defaults=read_chat_defaults(plan.model.path),
        )
        with EngineProcess(plan) as engine:
            life = _Life(door, engine, progress or NoProgress(), announce)
            asyncio.run(life.run(listener))


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host:port`; 0 picks a free port.

    Raises:
        ConfigError: The address is taken, forbidden or unknown.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"the host {host!r} is unknown",
            why=str(error),
            fix="--host 127.0.0.1 for this machine only, or 0.0.0.0 for every interface",
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets may be bound to a port until one listens
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    return listener


def _bind_error(error: OSError, host: str, port: int) -> ConfigError:
    fixes = {
        errno.EADDRINUSE: f"stop the program that listens there (`ss -ltnp 'sport = {port}'` "
        f"names it), or choose another port: --port {port % 65535 + 1}",
        errno.EACCES: "ports below 1024 belong to root; choose another one: --port 30000",
        errno.EADDRNOTAVAIL: "no interface of this machine has this address; --host 127.0.0.1",
    }
    return ConfigError(
        f"cannot listen on {host}:{port}",
        why=error.strerror or str(error),
        fix=fixes.get(error.errno or 0, "choose another --host or --port"),
    )


def _raise_file_limit() -> None:
    """Every connection is a file, and evaluations open thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Life:
    """One run of the server, from the first health check to the last answer."""

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
        self._server = _Server(
            uvicorn.Config(
                build_app(door),
                log_config=None,
                log_level="info" if door.plan.serve.log_level == "debug" else "warning",
                access_log=door.plan.serve.log_level == "debug",
                lifespan="off",
                ws="none",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S + 2,
            ),
            on_stop=self._begin_stop,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        """Serve on `listener` until a signal, or until the engine fails to start."""
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
            return
        connection = AsyncConnection(self._engine, on_death=self._on_death)
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

    def _begin_stop(self) -> None:
        """Refuse new work; end what still runs after the grace period."""
        self._door.client.stop()
        self._tasks.add(asyncio.create_task(self._end_stragglers()))

    async def _end_stragglers(self) -> None:
        await asyncio.sleep(GRACE_S)
        self._door.client.abort_all_now()

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
    """uvicorn, with signals that end in our own clean-up instead of being raised again."""

    def __init__(self, config: uvicorn.Config, *, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if not self.should_exit:
            self._on_stop()
        self.handle_exit(number, None)  # a second SIGINT does not wait any more
