# SPDX-License-Identifier: Apache-2.0
"""The engine as a process of its own, seen from the door that started it.

The child (`engine/child.py`) is a fresh interpreter, so a user's script needs no `__main__`
guard and may be run from anywhere. Its standard input carries the plan, and then stays open: when
it closes, the parent is gone, and the child ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from tetrarch.config.plan import Plan
from tetrarch.core.errors import ConfigError
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.engine.connection import Connection
from tetrarch.engine.messages import INBOUND, OUTBOUND, LoadProgress, Ready, StartFailed

__all__ = ["EngineProcess"]

_LONGEST_SOCKET_PATH = 107
_GRACE_S = 5.0
_STDERR = 2
_STOPPING = frozenset({signal.SIGINT, signal.SIGHUP, signal.SIGTERM})


class EngineProcess:
    """Start an engine, and end it; a context manager.

    Make a `Connection` or an `AsyncConnection` from it, at any time.

    Attributes:
        inbound: Where a connection sends messages.
        outbound: Where it receives batches.
        sentinel: A file descriptor that becomes readable when the child has ended.
    """

    def __init__(self, plan: Plan) -> None:
        """Start the child, and return before it is ready.

        Raises:
            ConfigError: The temporary folder's path is too long for a socket.
        """
        folder = _socket_folder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbound = self._bind(zmq.PUSH, f"{folder}/{INBOUND}")
        self.outbound = self._bind(zmq.PULL, f"{folder}/{OUTBOUND}")
        with _held_signals():
            self._child = subprocess.Popen(
                # -P: files in the working directory hide no module.
                [sys.executable, "-P", "-m", "tetrarch.engine.child"],
                stdin=subprocess.PIPE,
                stdout=_STDERR,  # what libraries print must not mix with a command's output
                env={**os.environ, **dict(plan.process_env)},
            )
        self._was_ready = False
        self.sentinel, sign = os.pipe()
        # No `Thread.join`: one that Ctrl-C cuts short takes the thread for ended (Python 3.11).
        ended = threading.Event()
        threading.Thread(target=_watch, args=(self._child, sign, ended), daemon=True).start()
        self._end = weakref.finalize(self, _end, self._child, folder, ended)
        # A connection may use these until then.
        weakref.finalize(self, os.close, self.sentinel)
        weakref.finalize(self, _close_sockets, self._context, self.inbound, self.outbound)
        self._hand_over((folder, plan))

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """The child's return code; `None` while it runs."""
        return self._child.returncode

    def wait_ready(self, progress: Progress | None = None) -> Ready:
        """Wait until the weights are loaded, and show how far that has come.

        Raises:
            TetrarchError: What stopped the start, of the class that the engine raised.
            EngineDead: The process ended without a word.
        """
        relay = _Relay(progress or NoProgress())
        connection = Connection(self)
        while True:
            for message in connection.receive():
                if isinstance(message, LoadProgress):
                    relay.show(message)
                elif isinstance(message, StartFailed):
                    raise message.error()
                elif isinstance(message, Ready):
                    self._was_ready = True
                    return message

    def close(self) -> None:
        """End the child and remove its folder; once is enough, from any thread.

        The child is asked to go, and killed where it has not gone after 5 s: one that is stopped,
        or stuck in a kernel, hears nothing. One that still loads is killed at once, because it
        listens late and has nothing to lose. Whoever waits for the child, in `wait_ready` or in a
        connection, gets an `EngineDead`.
        """
        if not self._was_ready:
            self.kill()
        self._end()

    def kill(self) -> None:
        """End the child by force, from any thread; a `close` that waits for it returns."""
        self._child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _bind(self, kind: int, path: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # requests queue in the scheduler, never here
        socket.linger = 0
        socket.bind(f"ipc://{path}")
        return socket

    def _hand_over(self, start: tuple[str, Plan]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended already; the sentinel tells
            pickle.dump(start, self._child.stdin)
            self._child.stdin.flush()


class _Relay:
    """Drive a progress bar here with what the child reports."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._label, self._done = "", 0

    def show(self, message: LoadProgress) -> None:
        if message.label != self._label:
            self._progress.start(message.label, message.total, message.unit)
            self._label, self._done = message.label, 0
        self._progress.advance(message.done - self._done)
        self._done = message.done
        if message.finished:
            self._progress.finish()
            self._label = ""


@contextlib.contextmanager
def _held_signals() -> Generator[None]:
    """Let a child inherit a mask that holds back the signals it will ignore.

    Ctrl-C reaches the whole group, and the child imports for seconds before it can ignore it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _socket_folder() -> str:
    folder = tempfile.mkdtemp(prefix="tetrarch-")
    if len(f"{folder}/{OUTBOUND}".encode()) > _LONGEST_SOCKET_PATH:
        Path(folder).rmdir()
        raise ConfigError(
            f"{folder} is too long a path for a socket",
            why=f"the kernel takes {_LONGEST_SOCKET_PATH} bytes",
            fix="set TMPDIR to a shorter path, such as /tmp",
        )
    return folder


def _watch(child: subprocess.Popen[bytes], sign: int, ended: threading.Event) -> None:
    """Close the other end of the sentinel when the child has ended."""
    child.wait()
    os.close(sign)
    ended.set()


def _close_sockets(context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]) -> None:
    """Close sockets before their context, which would wait for them for ever.

    The garbage collector guarantees no such order where they are part of a cycle.
    """
    for socket in sockets:
        socket.close()
    context.term()


def _end(child: subprocess.Popen[bytes], folder: str, ended: threading.Event) -> None:
    """Let the child go, by force after a while; leave nothing behind."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    try:
        ended.wait(_GRACE_S)
    finally:  # also where Ctrl-C cuts the wait short
        if not ended.is_set():
            child.kill()
            ended.wait()
        shutil.rmtree(folder, ignore_errors=True)
