# SPDX-License-Identifier: Apache-2.0
"""What the engine process does all day: take what has arrived, step, tell what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tetrarch.core.errors import RequestError
from tetrarch.core.log import get_logger
from tetrarch.engine.control import Control
from tetrarch.engine.engine import Engine
from tetrarch.engine.messages import (
    Abort,
    ControlReply,
    Heartbeat,
    Inbound,
    Outbound,
    Shutdown,
    Snapshot,
    decode_inbound,
)
from tetrarch.engine.replies import accepted, sentence
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

    An error of a request goes back to its sender, and so does whatever a control message meets. Any
    error of a step is a defect, and ends the process: the parent sees that at once, while an engine
    that limps on would be noticed late.
    """

    def __init__(
        self, engine: Engine, inbox: Inbox, tell: Callable[[list[Outbound]], None]
    ) -> None:
        self._engine, self._inbox, self._tell = engine, inbox, tell
        self._control = Control(engine, self._say)
        self._news: list[Outbound] = []
        self._told = _gist(engine.heartbeat())
        self._stops = False

    def run(self) -> None:
        """Run until `Shutdown`."""
        while not self._stops:
            self.turn()

    def turn(self) -> None:
        """Take messages, wait for them if there is nothing else to do; step once; tell."""
        arrived = self._inbox.take(self._patience())
        with self._control.courtesy.turn():
            for data in arrived:
                self._read(data)
            if self._control.may_step:
                self._news += self._engine.step()
            self._control.settle()
            self._report()
            if self._news:
                self._tell(self._news)
                self._news = []

    def _patience(self) -> float | None:
        """How long to wait for a message, if for ever `None`."""
        if self._engine.has_work and self._control.may_step:
            return 0.0
        return self._control.patience

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
            case Snapshot():
                self._say([accepted(message.ticket, **self._engine.snapshot())])
            case Shutdown():
                self._news += self._engine.abort(Abort(everything=True), by="the server's end")
                self._stops = True
            case _:
                self._control.answer(message)

    def _add(self, request: GenerateRequest) -> None:
        finish = self._control.gate(is_probe=request.is_probe)
        try:
            if finish is None:
                self._engine.add(request)
                return
        except RequestError as error:
            finish = FinishReason(
                kind="abort",
                message=sentence(error),
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
            self._say([accepted(abort.ticket, aborted=len(ended))])

    def _say(self, news: Sequence[Delta | ControlReply]) -> None:
        """Tell; a client that has its reply finds what the reply says in every door's facts."""
        if any(isinstance(one, ControlReply) for one in news):
            self._report()
        self._news += news

    def _report(self) -> None:
        """Send a heartbeat if it says something new; one without news is sent every second."""
        beat = self._engine.heartbeat()
        if (gist := _gist(beat)) != self._told:
            self._told = gist
            self._news.append(beat)


def _gist(beat: Heartbeat) -> tuple[object, ...]:
    """Return what a door should know at once."""
    load = (beat.num_running, beat.num_waiting, beat.num_used_tokens > 0, beat.is_paused)
    counts_anew = beat.spec is not None and not beat.spec.since_flush.num_verifies
    facts = (beat.is_updating, beat.weight_version, beat.model_path, beat.state)
    return (*load, *facts, counts_anew)
