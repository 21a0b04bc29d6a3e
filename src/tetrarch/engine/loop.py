# SPDX-License-Identifier: Apache-2.0
"""What the engine process does all day: take what has arrived, step, tell what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from tetrarch.core.errors import RequestError
from tetrarch.core.log import get_logger
from tetrarch.engine.engine import Engine
from tetrarch.engine.messages import (
    Abort,
    ControlReply,
    Flush,
    Inbound,
    Outbound,
    Shutdown,
    Snapshot,
    decode_inbound,
)
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest

__all__ = ["EngineLoop", "Inbox"]

_log = get_logger(__name__)


class Inbox(Protocol):
    """Where messages wait."""

    def take(self, timeout: float | None) -> list[bytes]:
        """Return all that have arrived; wait up to `timeout` seconds for the first."""
        ...


class EngineLoop:
    """Drives one engine until it is told to shut down.

    An error of a request goes back to its sender. Any other error is a defect, and ends the
    process: the parent sees that at once, while an engine that limps on would be noticed late.
    """

    def __init__(
        self, engine: Engine, inbox: Inbox, tell: Callable[[list[Outbound]], None]
    ) -> None:
        self._engine, self._inbox, self._tell = engine, inbox, tell
        self._news: list[Outbound] = []
        self._flush: tuple[Flush, float] | None = None  # with its deadline
        self._load = (0, 0)
        self._stops = False

    def run(self) -> None:
        """Run until `Shutdown`."""
        while not self._stops:
            for data in self._inbox.take(self._patience()):
                self._read(data)
            self._news += self._engine.step()
            self._settle_flush()
            self._report_load()
            if self._news:
                self._tell(self._news)
                self._news = []

    def _patience(self) -> float | None:
        """How long to wait for a message, if for ever `None`."""
        if self._engine.has_work:
            return 0.0
        if self._flush is not None:
            return max(0.0, self._flush[1] - time.monotonic())
        return None

    def _read(self, data: bytes) -> None:
        try:
            message = decode_inbound(data)
        except msgspec.MsgspecError as error:
            _log.error("ignored a message that is none of ours: %s", error)
            return
        self._answer(message)

    def _answer(self, message: Inbound) -> None:
        match message:
            case GenerateRequest():
                self._add(message)
            case Abort():
                self._abort(message)
            case Flush():
                self._begin_flush(message)
            case Snapshot():
                payload = self._engine.snapshot()
                self._reply(message.ticket, ok=True, payload=payload)
            case Shutdown():
                self._abort(Abort(everything=True))
                self._stops = True

    def _add(self, request: GenerateRequest) -> None:
        try:
            self._engine.add(request)
        except RequestError as error:
            finish = FinishReason(
                kind="abort",
                message=f"{error.what}: {error.why}; {error.fix}",
                status=400,
                code="invalid_request",
                param=error.param,
            )
            self._news.append(Delta(rid=request.rid, finish=finish))

    def _abort(self, abort: Abort) -> None:
        ended = self._engine.abort(abort)
        if not abort.quiet:
            self._news += ended
        if abort.ticket:
            self._reply(abort.ticket, ok=True, payload={"aborted": len(ended)})

    def _begin_flush(self, flush: Flush) -> None:
        if self._flush is not None:
            self._reply(flush.ticket, ok=False, message="another flush is waiting")
        else:
            self._flush = (flush, time.monotonic() + flush.timeout)

    def _settle_flush(self) -> None:
        if self._flush is None:
            return
        flush, deadline = self._flush
        if self._engine.flush():
            self._reply(flush.ticket, ok=True, message="the prefix cache is empty")
        elif time.monotonic() < deadline:
            return
        else:
            self._reply(flush.ticket, ok=False, message="requests are running or waiting")
        self._flush = None

    def _reply(
        self, ticket: int, *, ok: bool, message: str = "", payload: dict[str, object] | None = None
    ) -> None:
        reply = ControlReply(ticket=ticket, ok=ok, message=message, payload=payload or {})
        self._news.append(reply)

    def _report_load(self) -> None:
        """Say how many run and wait when that has changed; the rest is told every second."""
        beat = self._engine.heartbeat()
        if (load := (beat.num_running, beat.num_waiting)) != self._load:
            self._load = load
            self._news.append(beat)
