# SPDX-License-Identifier: Apache-2.0
"""From a plan to a running server: take the port, start the engine, answer."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tetrarch.config.generation import read_chat_defaults
from tetrarch.config.plan import Plan
from tetrarch.core.errors import ConfigError
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.engine.process import EngineProcess
from tetrarch.engine.textless import tokenizer_of
from tetrarch.serve.client import EngineClient
from tetrarch.serve.door import Door
from tetrarch.serve.life import BACKLOG, Life
from tetrarch.serve.metrics import Metrics
from tetrarch.serve.reply import time_update

__all__ = ["bind", "serve"]


def serve(
    plan: Plan,
    *,
    announce: Callable[[str], None],
    progress: Progress | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        plan: What, how and where.
        announce: Shows the operator the ready line (the address, and a command to try), and
            what a stop waits for. No log level hides either.
        progress: Shows how far loading has come.

    Raises:
        ConfigError: The address cannot be had; found out before anything is loaded.
        TetrarchError: What stopped the engine's start.
        EngineDead: The engine died while serving; raised when the server is stopped.
        KeyboardInterrupt: SIGINT came before the engine was ready. Later it is how to stop.
    """
    with bind(plan.serve.host, plan.serve.port) as listener:
        _raise_file_limit()
        host = replace(plan.serve, port=listener.getsockname()[1])  # where it was 0
        metrics = Metrics(plan.model.served_name)
        door = Door(
            plan=replace(plan, serve=host),
            client=EngineClient(partial(time_update, metrics)),
            tokenizer=tokenizer_of(plan),
            metrics=metrics,
            chat_defaults=read_chat_defaults(Path(plan.model.path)),
        )
        with EngineProcess(plan) as engine:
            life = Life(door, engine, progress or NoProgress(), announce)
            asyncio.run(life.run(listener))
    if life.was_interrupted:
        raise KeyboardInterrupt


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
        listener.listen(BACKLOG)  # two sockets may be bound to a port until one listens
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
