# SPDX-License-Identifier: Apache-2.0
"""Every control message, answered between two steps.

The loop is one thread, so a message that it reads finds the scheduler at rest: reading it is the
barrier. What must wait, for requests to end or for a job beside the steps, is settled later, again
between two steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import (
    Action,
    BeginUpdate,
    CheckWeights,
    Continue,
    DestroyGroup,
    EndUpdate,
    GetWeights,
    InitGroup,
    Pause,
    PostProcess,
    Release,
    Resume,
    SetVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
)
from tetrarch.engine.engine import Engine
from tetrarch.engine.groups import Groups
from tetrarch.engine.inspection import Inspection
from tetrarch.engine.jobs import OneJob
from tetrarch.engine.messages import Abort, ControlReply, Flush
from tetrarch.engine.occupation import Occupation
from tetrarch.engine.replies import Act, accepted, answered, busy
from tetrarch.engine.request import Delta, FinishReason
from tetrarch.engine.updates import Updates
from tetrarch.executor.executor import READY
from tetrarch.executor.updates import WeightsState

__all__ = ["Control"]

_POLL_S = 0.005  # how often an engine without work looks whether a job beside the steps is done

Say = Callable[[Sequence[Delta | ControlReply]], None]
_PAUSED = (
    'a pause keeps them, and nobody waits for that: POST /pause_generation {"mode": "retract"}, or '
    "/continue_generation"
)
_WAIT: Mapping[type[Flush | Release], str] = {Flush: "?timeout=60", Release: '"wait_s": 60'}


@dataclass(frozen=True)
class _Waiting:
    """A message whose turn comes when requests have ended, or when its time is up."""

    message: Flush | Release
    deadline: float
    facts: Mapping[str, Any]  # of an update that it has ended


class Control:
    """What clients do to all: pauses, updates, memory, versions, checks.

    Attributes:
        courtesy: What goes on beside a step leaves it alone.
    """

    def __init__(self, engine: Engine, say: Say) -> None:
        """Begin.

        Args:
            engine: Nobody else changes whether it may step.
            say: Takes replies, and the last deltas of requests that end here.
        """
        self._engine, self._say = engine, say
        self._jobs = OneJob()
        self.courtesy = self._jobs.courtesy
        self._updates = Updates(engine, self._jobs, say=say, abort_all=self._abort_for_update)
        self._groups = Groups(self._updates, self._jobs, engine.rank.device)
        self._occupation = Occupation(engine)
        self._inspection = Inspection(engine.rank.weights)
        self._arrived: deque[Action | Flush] = deque()
        self._waiting: list[_Waiting] = []

    @property
    def may_step(self) -> bool:
        """Whether the weights are whole, all memory is there, and nobody has paused."""
        engine = self._engine
        return not (engine.is_paused or self._updates.is_open) and engine.rank.state == READY

    @property
    def patience(self) -> float | None:
        """Seconds until `settle` may have something to do; `None`: not before a message."""
        if self._jobs.is_busy:
            return _POLL_S
        now = time.monotonic()
        times = [max(0.0, one.deadline - now) for one in self._waiting]
        if (idle := self._updates.patience) is not None:
            times.append(idle)
        return min(times, default=None)

    def gate(self, *, is_probe: bool = False) -> FinishReason | None:
        """Return why a request that arrives now must go; `None`: the engine may have it.

        A probe only looks: it ends no update, and does not wait for one.
        """
        lacking = ""
        if is_probe:
            lacking = "an update of the weights is open" if self._updates.is_open else ""
        elif not self._engine.is_paused:
            lacking = self._updates.end_for_request()
        code = self._engine.rank.state
        if lacking and code == READY:
            return _unavailable(WeightsState.INCONSISTENT.value, lacking)
        return None if code == READY else _unavailable(code, _REASONS[code])

    def answer(self, message: Action | Flush) -> None:
        """Do what a message asks for; it is answered now or by a later `settle`.

        What comes behind a call with tensors waits until they are decoded, as if no time passed.
        Only a pause need not: it changes no weights, and lets the decoding have all the time.
        """
        if isinstance(message, Pause) and not self._arrived:
            self._try(message.ticket, partial(self._act, message))
            return
        self._arrived.append(message)
        self._go_on()

    def _go_on(self) -> None:
        while self._arrived and not self._jobs.holds_up:
            message = self._arrived.popleft()
            self._try(message.ticket, partial(self._act, message))

    def settle(self) -> None:
        """Answer what has waited, as far as that is possible now."""
        if (job := self._jobs.take()) is not None:
            self._try(job.ticket, job.finish)
            self._go_on()
        self._updates.settle()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._try(one.message.ticket, partial(self._retry, one))

    def _try(self, ticket: int, act: Act) -> None:
        """Act between two steps: what is in flight comes first, and is told first."""
        self._say(self._engine.drain())
        if (reply := answered(ticket, act, code=self._code)) is not None:
            self._say([reply])

    def _code(self) -> str:
        """A refusal's own code, unless the weights are spoilt: then that is what matters."""
        state = self._engine.rank.weights.state
        return state.value if state is WeightsState.INCONSISTENT else ""

    def _act(self, message: Action | Flush) -> ControlReply | None:
        match message:
            case Flush() | Release():
                return self._begin_waiting(message)
            case Pause() | Continue() | SetVersion():
                return self._steer(message)
            case BeginUpdate() | EndUpdate() | PostProcess():
                return self._bracket(message)
            case UpdateFromDisk() | UpdateFromTensors() | UpdateFromDistributed():
                return self._update(message)
            case InitGroup() | DestroyGroup():
                joins = isinstance(message, InitGroup)
                return self._groups.join(message) if joins else self._groups.leave(message)
            case Resume() | GetWeights() | CheckWeights():
                return self._look(message)

    def _update(
        self, message: UpdateFromDisk | UpdateFromTensors | UpdateFromDistributed
    ) -> ControlReply | None:
        if isinstance(message, UpdateFromDisk):
            return self._updates.from_disk(message)
        if isinstance(message, UpdateFromTensors):
            return self._updates.from_tensors(message)
        self._updates.check_call()
        return self._groups.receive(message)

    def _look(self, message: Resume | GetWeights | CheckWeights) -> ControlReply:
        match message:
            case Resume():
                return self._occupation.resume(message)
            case GetWeights():
                return self._inspection.read(message)
            case CheckWeights():
                if message.action == "reset_tensors":
                    self._require_no_update()
                return self._inspection.check(message)

    def _steer(self, message: Pause | Continue | SetVersion) -> ControlReply:
        engine = self._engine
        match message:
            case Pause():
                if message.mode == "abort":
                    self._abort_all("/pause_generation")
                elif message.mode == "retract":
                    engine.retract()
                engine.is_paused = True
                count = engine.num_paused
                return accepted(message.ticket, "paused", num_paused_requests=count)
            case Continue():
                facts = self._updates.end_if_implicit()
                engine.is_paused = False
                return accepted(message.ticket, "continued", **facts)
            case SetVersion():
                if message.abort_all_requests:
                    self._abort_all("/update_weight_version")
                engine.weight_version = message.version
                text = f"the weights are version {message.version}"
                return accepted(message.ticket, text, new_version=message.version)

    def _bracket(self, message: BeginUpdate | EndUpdate | PostProcess) -> ControlReply:
        """Begin or end an update by tensors."""
        ticket, updates = message.ticket, self._updates
        match message:
            case BeginUpdate():
                is_atomic = updates.begin(atomic=message.atomic, selector=message.selector)
                return accepted(ticket, "the update has begun", atomic=is_atomic)
            case EndUpdate():
                return updates.end(ticket)
            case PostProcess():
                if message.begins and not updates.is_open:
                    updates.begin(atomic=None)
                if message.ends and updates.is_open:
                    return updates.end(ticket)
                text = "the update is open" if updates.is_open else "no update is open"
                return accepted(ticket, text)

    def _begin_waiting(self, message: Flush | Release) -> ControlReply | None:
        if isinstance(message, Release):
            self._require_no_update()
            wait, facts = message.wait_s, dict[str, Any]()
        else:
            if any(isinstance(one.message, Flush) for one in self._waiting):
                raise RequestError(
                    "another flush is waiting",
                    why="the first one empties the cache for both",
                    fix="wait for it",
                )
            wait, facts = message.timeout, self._updates.end_if_implicit()
        deadline = time.monotonic() + (wait if math.isfinite(wait) else 0.0)
        return self._retry(_Waiting(message, deadline, facts))

    def _retry(self, waiting: _Waiting) -> ControlReply | None:
        """Try again what requests are in the way of; refuse it when its time is up."""
        message = waiting.message
        if isinstance(message, Release):
            self._require_no_update()
            reply = self._occupation.release(message)
        else:
            text = "the prefix cache is empty"
            done = self._engine.flush()
            reply = accepted(message.ticket, text, **waiting.facts) if done else None
        if reply is not None:
            return reply
        if time.monotonic() < waiting.deadline:
            self._waiting.append(waiting)
            return None
        advice = f"{_WAIT[type(message)]} waits for them"
        return busy(message.ticket, _PAUSED if self._engine.is_paused else advice, waiting.facts)

    def _require_no_update(self) -> None:
        self._jobs.require_none()
        if self._updates.is_open:
            raise RequestError(
                "an update by tensors is open",
                why="its layers are half written, and would be lost",
                fix="POST /end_weight_update first",
            )

    def _abort_for_update(self) -> None:
        self._abort_all("an update of the weights")

    def _abort_all(self, by: str) -> None:
        self._say(self._engine.abort(Abort(everything=True), by=by))


_REASONS = {
    "weights_inconsistent": "an update of the weights failed half-way; a full update must follow",
    "weights_released": "the weights are released; POST /resume_memory_occupation",
    "weights_not_loaded": "the weights were released and not kept; a full update must follow",
    "kv_released": "the KV cache is released; POST /resume_memory_occupation",
}


def _unavailable(code: str, reason: str) -> FinishReason:
    return FinishReason(kind="abort", message=reason, status=503, code=code)
