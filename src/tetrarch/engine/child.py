# SPDX-License-Identifier: Apache-2.0
"""The engine process itself: `python -m tetrarch.engine.child`, started by `EngineProcess`.

It ends with its parent, however that ends: standard input closes then.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time

import msgspec
import zmq

from tetrarch.config.plan import Plan
from tetrarch.core.errors import TetrarchError
from tetrarch.core.log import configure_logging, get_logger
from tetrarch.engine.engine import Engine
from tetrarch.engine.loop import EngineLoop
from tetrarch.engine.messages import (
    INBOUND,
    OUTBOUND,
    LoadProgress,
    Outbound,
    Ready,
    StartFailed,
    encode,
)
from tetrarch.engine.text import load_tokenizer
from tetrarch.executor.capacity import free_bytes
from tetrarch.executor.executor import Executor

__all__ = ["main"]

_BEAT_S = 1.0
_PROGRESS_S = 0.1
_log = get_logger(__name__)


class Link:
    """The child's ends of the sockets. One thread each: zmq sockets are not shared."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbound = self._connect(zmq.PULL, INBOUND)
        self._outbound = self._connect(zmq.PUSH, OUTBOUND)
        self._closing = threading.Event()
        self._heart: threading.Thread | None = None

    def take(self, timeout: float | None) -> list[bytes]:
        """Return all messages that have arrived; wait up to `timeout` seconds for the first."""
        messages: list[bytes] = []
        wait = None if timeout is None else int(timeout * 1000)
        while self._inbound.poll(0 if messages else wait):
            messages.append(self._inbound.recv())
        return messages

    def tell(self, messages: list[Outbound]) -> None:
        """Send one batch; never waits for the reader."""
        self._outbound.send(encode(messages))

    def keep_telling(self, engine: Engine) -> None:
        """Send a heartbeat every second from a thread, so that a long step is no silence."""
        self._heart = threading.Thread(target=self._beat, args=(engine,), daemon=True)
        self._heart.start()

    def close(self) -> None:
        """Let what was told reach the parent, for a second at most."""
        self._closing.set()
        if self._heart is not None:
            self._heart.join()
        self._context.destroy(linger=1000)

    def _beat(self, engine: Engine) -> None:
        outbound = self._connect(zmq.PUSH, OUTBOUND)
        while not self._closing.wait(_BEAT_S):
            outbound.send(encode([engine.heartbeat()]))
        outbound.close()

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.connect(f"ipc://{self._folder}/{name}")
        return socket


class LinkProgress:
    """Report progress to the parent a few times a second, and to the log at the end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._label, self._total, self._unit = "", 0, ""
        self._done, self._began, self._told = 0, 0.0, 0.0

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a piece of work."""
        self._label, self._total, self._unit = label, total, unit
        self._done, self._began = 0, time.monotonic()
        self._tell()

    def advance(self, amount: int = 1) -> None:
        """Some of it is done."""
        self._done += amount
        if time.monotonic() - self._told > _PROGRESS_S:
            self._tell()

    def finish(self) -> None:
        """All of it is done."""
        self._tell(finished=True)
        _log.info("%s took %.1f s", self._label, time.monotonic() - self._began)

    def _tell(self, *, finished: bool = False) -> None:
        self._told = time.monotonic()
        message = LoadProgress(
            label=self._label,
            total=self._total,
            unit=self._unit,
            done=self._done,
            finished=finished,
        )
        self._link.tell([message])


def main() -> None:
    """Take a plan from the parent, load, and serve until told to stop."""
    # A terminal, `timeout` and systemd signal the whole group; the parent is the one to end us,
    # and has held these signals back until now.
    ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    try:
        folder, plan = pickle.load(sys.stdin.buffer)
    except EOFError:  # the parent ended before it had said what to do
        return
    configure_logging(level=plan.serve.log_level, who="engine")
    threading.Thread(target=_end_with_parent, args=(folder, os.getppid()), daemon=True).start()
    link = Link(folder)
    try:
        engine = _start(plan, link)
        link.keep_telling(engine)
        EngineLoop(engine, link, link.tell).run()
    finally:
        link.close()


def _start(plan: Plan, link: Link) -> Engine:
    """Load, and tell the parent that it is done, or why it cannot be."""
    available = free_bytes(plan.device)
    try:
        executor = Executor(plan, progress=LinkProgress(link))
        path = plan.model.tokenizer_path
        engine = Engine(plan, executor, None if path is None else load_tokenizer(path))
    except TetrarchError as error:
        link.tell([StartFailed.of(error)])
        raise SystemExit(1) from error  # the parent prints it: three lines, no traceback
    facts = {
        "capacity": executor.capacity,
        "limits": engine.limits,
        "load_report": executor.load_report,
        "memory": executor.memory,
        "startup_available": available,
        "weight_version": engine.weight_version,
    }
    gc.freeze()  # it all stays: walking it would hold steps up for 0.3 s, now and then
    link.tell([Ready(payload=msgspec.to_builtins(facts))])
    link.tell([engine.heartbeat()])  # apart: who waits for `Ready` reads no further
    return engine


def _end_with_parent(folder: str, parent: int) -> None:
    """End this process when standard input closes, or when somebody else has become the parent."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
