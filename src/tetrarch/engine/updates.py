# SPDX-License-Identifier: Apache-2.0
"""Updates of the weights, as the engine lives through them: one at a time, between two steps.

The weights' own room (`executor/weights.py`) plans, writes and takes back. Here is decided when,
what becomes of the requests that live meanwhile, and what the weights are called afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from tetrarch.core.errors import TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.engine.actions import (
    Selector,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
)
from tetrarch.engine.adoption import Adoption
from tetrarch.engine.calls import ABANDON_S, Calls, Refusals
from tetrarch.engine.engine import Engine
from tetrarch.engine.jobs import OneJob, Then
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.replies import (
    END,
    Say,
    accepted,
    failed_update,
    left_out,
    no_update,
    other_update,
    sentence,
    taken,
    update_summary,
)
from tetrarch.executor.updates import DiskUpdate, Received
from tetrarch.models.faults import listed
from tetrarch.models.payload import decode_payload

__all__ = ["Updates"]

_log = get_logger(__name__)
_SHOWN = 10  # names in a payload


class Updates:
    """Takes weights from a folder or from tensors.

    An update by tensors is implicit where nobody began it; then the first message that relies on
    it ends it. No step runs while one is open: some layers are new already.
    """

    def __init__(
        self, engine: Engine, jobs: OneJob, *, say: Say, abort_all: Callable[[], None]
    ) -> None:
        """Begin; `say` takes what an update has done that no call has ended, under ticket 0."""
        self._engine, self._jobs, self._say, self._abort_all = engine, jobs, say, abort_all
        self._adoption = Adoption(engine)
        self._store = engine.rank.weights
        self._calls: Calls | None = None
        self._refusals = Refusals()
        self._is_awaited = False  # by a request that came while a call was being decoded

    @property
    def is_open(self) -> bool:
        """Whether an update by tensors has begun and not ended."""
        return self._store.is_open

    @property
    def patience(self) -> float | None:
        """Seconds until `settle` may have something to do; `None`: not before a message."""
        return self._calls.patience if self.is_open and self._calls is not None else None

    def settle(self) -> None:
        """Give an implicit update up that its trainer has left, or end it if it is whole.

        Of an explicit one, remind.
        """
        if self._jobs.is_busy:
            return
        if self._is_awaited:
            self._is_awaited = False
            self.end_for_request()
        if self._calls is None or self.patience != 0.0:
            return
        if self._calls.is_explicit:
            self._calls.remind(self._engine.heartbeat())
        elif lacking := self._store.unfinished():
            what = listed(lacking)
            _log.error("gave up an update: %.0f s without a call, and it lacks %s", ABANDON_S, what)
            self.give_up()
        else:
            _log.warning("ended an update: %.0f s without a call, and it is whole", ABANDON_S)
            self.end_for_request()

    def from_disk(self, message: UpdateFromDisk) -> None:
        """Plan beside the steps, then commit; `RequestError` while another is under way."""
        if self._is_explicit and self.is_open:
            raise other_update("an update by tensors is open", fix=END)
        work = partial(self._plan, message)
        self._jobs.start(message.ticket, f"another update, from {message.path}, is under way", work)

    def begin(self, *, atomic: bool | None, selector: Selector = "all") -> bool:
        """Begin an update by tensors; return whether a failure will restore the old weights.

        Raises:
            ConfigError: An undo copy was demanded and does not fit, or the weights are released.
            RequestError: Another update is under way.
        """
        self._jobs.require_none()
        if self.is_open:
            raise other_update("an update by tensors is open", fix=END)
        is_atomic = self._store.begin(atomic=atomic)
        self._calls = Calls(is_explicit=True, selector=selector)
        return is_atomic

    def check_call(self) -> None:
        """Check that a call with tensors is in its place.

        Raises:
            RequestError: Another update is under way, or the one it belongs to has failed.
        """
        self._jobs.require_none()
        if not self.is_open and self._is_explicit:
            raise failed_update()
        if not self.is_open:
            self._calls = None

    def from_tensors(self, message: UpdateFromTensors) -> None:
        """Decode and check tensors beside the steps; then take them between two of them.

        Raises:
            RequestError: Another update is under way, or the one it belongs to has failed.
        """
        self.check_call()
        work = partial(self._decode, message)
        self._jobs.start(message.ticket, "tensors are being decoded", work, holds_up=True)

    def _decode(self, message: UpdateFromTensors) -> Then:
        with self._refusals.counted():
            tensors = decode_payload(message.data, message.load_format)
        return self.received(message, tensors)

    def foresee(self, message: UpdateFromDistributed, announced: Mapping[str, Tensor]) -> None:
        """Raise `CheckpointError` if tensors could not be taken that are yet to be received."""
        with self._refusals.counted():
            self._store.foresee(self._store.select(announced, *self._selectors(message)))

    def received(
        self, message: UpdateFromTensors | UpdateFromDistributed, tensors: Mapping[str, Tensor]
    ) -> Then:
        """Check the tensors of one call, beside the steps; return what remains to be done.

        That takes them, and ends an implicit update if the call says `flush_cache`: an error where
        values cannot be weights, or what would end is not complete.

        Raises:
            CheckpointError: They do not fit; the call has changed nothing.
        """
        kept = self._store.select(tensors, *self._selectors(message))
        if message.flush_cache and not self.is_open and self._store.holds(kept):
            return partial(self._repeated, message)
        with self._refusals.counted():
            others = tensors.keys() - kept.keys()
            received = self._store.receive(kept, others) if tensors else None
        return partial(self._take, message, received)

    def _selectors(self, message: UpdateFromTensors | UpdateFromDistributed) -> list[str]:
        return [message.selector, *([] if self._calls is None else [self._calls.selector])]

    def _take(
        self, message: UpdateFromTensors | UpdateFromDistributed, received: Received | None
    ) -> ControlReply:
        if message.abort_all_requests:
            self._abort_all()
        if received is not None:
            with self._refusals.counted():
                self._store.take(received)
        calls = self._calls = self._calls or Calls(is_explicit=False)
        calls.note(message)
        if message.flush_cache and not calls.is_explicit:
            return self._finish(message.ticket)
        return taken(
            message.ticket,
            received,
            is_open=self.is_open,
            unfinished=self._store.unfinished()[:_SHOWN],
            num_paused_requests=self._adoption.num_held,
            weight_version=self._engine.weight_version,
        )

    def give_up(self) -> None:
        """Take the open update back: whole layers are not served beside those that never came."""
        self._store.abandon()

    def end(self, ticket: int) -> ControlReply:
        """End the update by tensors.

        Raises:
            CheckpointError: It is not complete, or the model does not hold what was written.
            RequestError: None is open, it has failed before, or another update is under way.
        """
        self._jobs.require_none()
        if not self.is_open:
            is_explicit, self._calls = self._is_explicit, None
            if is_explicit:
                raise failed_update()
            raise no_update()
        return self._finish(ticket)

    def end_if_implicit(self) -> dict[str, Any]:
        """End an update that nobody began, for what comes next relies on it.

        Returns:
            What it did, as keys of a payload; empty if none was open.

        Raises:
            CheckpointError: It is not complete. It is over, and taken back where that was possible.
            RequestError: Some of it is being received.
        """
        if not self._is_implicit:
            return {}
        self._jobs.require_none()
        return self._finish(0).payload

    def end_for_request(self) -> str:
        """End an implicit update before a request that arrives.

        Returns:
            In words what is missing, if the request cannot be served for that; the update then
            goes on, for its trainer is not to be disturbed.
        """
        if not self._is_implicit:
            return ""
        if self._jobs.is_busy:
            self._is_awaited = True
            return ""
        if lacking := self._store.unfinished():
            return f"an update lacks {listed(lacking)}"
        try:
            self._say([self._finish(0)])
        except TetrarchError as error:  # the state of the weights says what to do with the request
            _log.error("an update could not be ended: %s", sentence(error))
        return ""

    @property
    def _is_explicit(self) -> bool:
        return self._calls is not None and self._calls.is_explicit

    @property
    def _is_implicit(self) -> bool:
        return self.is_open and not self._is_explicit

    def _finish(self, ticket: int) -> ControlReply:
        calls, self._calls = self._calls or Calls(is_explicit=False), None
        with self._refusals.counted():
            report = self._store.finish()
        facts = self._adoption.adopt(
            report, source=calls.source, version=calls.version, flush=calls.flush
        )
        if report is not None:
            facts["warnings"] += self._refusals.told()
        return accepted(ticket, update_summary(report), is_open=False, unfinished=[], **facts)

    def _repeated(self, message: UpdateFromTensors | UpdateFromDistributed) -> ControlReply:
        """Answer the last call of the last update once more; its first answer was lost."""
        if message.abort_all_requests:
            self._abort_all()
        self._adoption.rename(message.weight_version)
        return accepted(
            message.ticket,
            "the last update has brought these tensors already",
            is_open=False,
            unfinished=[],
            num_paused_requests=self._adoption.num_held,
            **self._adoption.names,
        )

    def _plan(self, message: UpdateFromDisk) -> Then:
        return partial(self._commit, message, self._store.plan(message.path, atomic=message.atomic))

    def _commit(self, message: UpdateFromDisk, update: DiskUpdate) -> ControlReply:
        if message.dry_run:
            text = f"{message.path} can be loaded; nothing was written"
            facts = {"atomic": update.atomic, "warnings": left_out(update.placements.unused)}
            return accepted(message.ticket, text, **facts, **self._adoption.names)
        if message.abort_all_requests:
            self._abort_all()
        self._calls = None
        report = self._store.commit(update)
        version, flush = message.weight_version, message.flush_cache
        facts = self._adoption.adopt(report, source="disk", version=version, flush=flush)
        self._engine.is_paused |= message.keep_pause
        return accepted(message.ticket, update_summary(report), **facts)
