# SPDX-License-Identifier: Apache-2.0
"""The weights of one rank over their life: loaded, replaced, restored, or not to be used.

An update is a transaction. It is planned from headers while requests run, written between two
steps, and taken back if anything fails: what is served is the old weights or the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from tetrarch.config.plan import Plan
from tetrarch.core.errors import CheckpointError
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.executor.planning import Planner
from tetrarch.executor.updates import (
    DiskUpdate,
    Received,
    Session,
    UpdateReport,
    WeightsState,
    failed,
    released,
    undo_fits,
    undone,
)
from tetrarch.memory.checksum import digest
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model
from tetrarch.models.load import fill, first_load
from tetrarch.models.readback import checksums, read_back
from tetrarch.models.report import LoadReport
from tetrarch.models.update import LiveUpdate
from tetrarch.models.writer import WeightWriter

__all__ = ["WeightStore"]


class WeightStore:
    """Owns the state of a model's weights. One thread writes; another may plan or receive.

    Attributes:
        state: Whether a forward may use them.
        path: Folder of the checkpoint that they came from last.
    """

    def __init__(self, model: Model, plan: Plan, *, free_host: Callable[[], int]) -> None:
        """Take over a model; `load` comes first.

        Args:
            model: Built.
            plan: What it was built from.
            free_host: Tells how many bytes of host memory an undo copy may take.
        """
        self._model, self._plan, self._free_host = model, plan, free_host
        self._session: Session | None = None
        self._done: Mapping[str, str] = {}  # digests of the last update's tensors, while they hold
        self._planner = Planner(model, plan)
        self.state = self._before = WeightsState.NOT_LOADED
        self.path = plan.model.path
        self.verify: Callable[[], None] = lambda: None  # called after every update; may refuse it

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, and so of a full undo copy."""
        layers = sum(layer.weights.num_bytes for layer in self._model.experts.values())
        return self._model.weights.num_bytes + layers

    def load(self, progress: Progress) -> LoadReport:
        """Load the plan's checkpoint for the first time.

        Raises:
            CheckpointError: It does not fit the model, or holds what cannot be weights.
        """
        report = first_load(self._model, self._plan, progress, place=self._planner.place)
        self.state = WeightsState.READY
        return report

    def plan(self, path: str, *, atomic: bool | None) -> DiskUpdate:
        """Check a checkpoint against the model, from its headers alone; nothing is written.

        Args:
            path: A local folder.
            atomic: Demand an undo copy, or renounce it; `None`: where the host has room.

        Raises:
            CheckpointError: Names, shapes, types, formats or the configuration do not fit.
            ConfigError: An undo copy was demanded and does not fit.
        """
        return self._planner.plan(path, atomic=self._can_undo(wanted=atomic))

    def commit(self, update: DiskUpdate, progress: Progress | None = None) -> UpdateReport:
        """Write a planned update. Between steps only.

        Raises:
            CheckpointError: A value or a file was at fault. The old weights are restored, bit for
                bit, or the state says that they are not.
        """
        self._require_memory()
        self.abandon()
        self._done = {}
        journal = Journal(keeps=update.atomic and self.state is WeightsState.READY)
        writer = WeightWriter(self._model, self._plan.quant, journal, digests=True)
        try:
            load = fill(writer, update.source, update.placements, progress=progress or NoProgress())
            self.verify()
        except Exception as error:
            raise self._failed(journal, error) from error
        self.state, self.path = WeightsState.READY, update.path
        return UpdateReport(
            atomic=journal.keeps,
            num_tensors=load.num_tensors,
            num_bytes=load.num_bytes,
            seconds=load.seconds,
            unused=load.unused,
            load=load,
        )

    @property
    def is_open(self) -> bool:
        """Whether an update by tensors has begun and not ended."""
        return self._session is not None

    @property
    def open_s(self) -> float:
        """Seconds since the update by tensors that is open has begun; 0 without one."""
        return 0.0 if (session := self._session) is None else session.age_s

    def begin(self, *, atomic: bool | None = None) -> bool:
        """Begin an update by tensors; one that is open is dropped like a failed one.

        Returns:
            Whether a failure will restore the old weights.

        Raises:
            ConfigError: An undo copy was demanded and does not fit.
        """
        self._require_memory()
        self.abandon()
        self._session, self._done = self._open(atomic=atomic), {}
        return self._session.is_atomic

    def select(self, tensors: Mapping[str, Tensor], *selectors: str) -> dict[str, Tensor]:
        """Return the tensors that all of these let through: `all`, `target`, `draft`."""
        is_draft = self._model.names.is_draft
        only = {selector == "draft" for selector in selectors if selector != "all"}
        return {name: value for name, value in tensors.items() if only <= {is_draft(name)}}

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the last thing that happened to the weights is an update with these tensors.

        A client whose last call was done, and its answer lost, sends the call again.
        """
        if not tensors or not tensors.keys() <= self._done.keys():
            return False
        return all(self._done[name] == digest(value) for name, value in tensors.items())

    def foresee(self, announced: Mapping[str, Tensor]) -> None:
        """Check tensors on `meta` that stand for those to come; nothing is taken.

        Raises:
            CheckpointError: Names, shapes or types are at fault.
        """
        self._require_memory()
        (self._session or self._open(atomic=None)).update.foresee(announced)

    def receive(self, tensors: Mapping[str, Tensor], unselected: Iterable[str] = ()) -> Received:
        """Check tensors, and quantize what is whole; `take` comes next. Touches no slot.

        Args:
            tensors: By checkpoint name.
            unselected: Names of those that came with them, and that `select` has left out.

        Raises:
            CheckpointError: Names, shapes, types or repetitions are at fault. Nothing was taken,
                and the update that is open, if any, goes on.
        """
        self._require_memory()
        session = self._session or self._open(atomic=None)
        pieces = session.update.check(tensors, unselected)
        try:
            session.update.stage(pieces)
        except Exception as error:
            return Received(session, pieces, error)
        return Received(session, pieces)

    def take(self, received: Received) -> None:
        """Write what was received and is whole; opens an update where none is open.

        Raises:
            CheckpointError: Values were at fault. The update is over, and the old weights are
                restored or the state says that they are not.
        """
        self._require_memory()
        session = received.session
        assert self._session in (None, session), "another update began meanwhile"
        self._session, self._done = session, {}
        try:
            if received.error is not None:
                raise received.error
            session.update.commit(received.pieces)
        except Exception as error:
            self._session = None
            raise self._failed(session.journal, error) from error

    def unfinished(self) -> list[str]:
        """Return in words what the open update still lacks; empty without one."""
        if (session := self._session) is None:
            return []
        return [*session.update.unfinished(), *session.update.missing(full=self._needs_all)]

    def finish(self) -> UpdateReport | None:
        """End the update by tensors; `None` where none was open.

        Raises:
            CheckpointError: Layers are half-complete, or the weights were undefined and some have
                not come. The old ones are restored, or the state says that they are not.
        """
        if (session := self._session) is None:
            return None
        self._session = None
        try:
            session.update.check_finished(full=self._needs_all)
            self.verify()
        except Exception as error:
            raise self._failed(session.journal, error) from error
        self.state, self._done = WeightsState.READY, session.update.digests
        return session.report()

    def abandon(self) -> None:
        """Drop an update by tensors and go back to the old weights, or say that one cannot."""
        if self._session is not None:
            journal, self._session = self._session.journal, None
            self._restore(journal)

    def checksums(self) -> dict[str, str]:
        """Return the digest of every tensor in the form in which it was loaded."""
        self._require_memory()
        return checksums(self._model)

    def value(self, name: str) -> Tensor:
        """Return a resident weight under its checkpoint name; experts decoded.

        Raises:
            RequestError: The model has no such weight.
        """
        self._require_memory()
        return read_back(self._model, name)

    @torch.no_grad()
    def scramble(self) -> None:
        """Overwrite every weight with noise, as a test that an update brings all of them."""
        self._require_memory()
        self.abandon()
        self.state, self._done = WeightsState.INCONSISTENT, {}
        for table in (self._model.weights, *(e.weights for e in self._model.experts.values())):
            for slot in table.values():
                slot.view(-1).view(torch.uint8).random_()

    def note_released(self) -> None:
        """Their memory is lent from now on."""
        self.abandon()
        self._before, self.state = self.state, WeightsState.RELEASED
        self._done = {}

    def note_resumed(self, *, restored: bool) -> None:
        """Their memory is back; `restored` with its contents."""
        self.state = self._before if restored else WeightsState.NOT_LOADED

    @property
    def _needs_all(self) -> bool:
        """Whether an update must bring every weight: what is resident is good for nothing."""
        return self.state is not WeightsState.READY

    def _open(self, *, atomic: bool | None) -> Session:
        journal = Journal(keeps=self._can_undo(wanted=atomic))
        return Session(LiveUpdate(self._model, self._plan.quant, journal), journal)

    def _can_undo(self, *, wanted: bool | None) -> bool:
        if self.state is not WeightsState.READY or wanted is False:
            return False  # there is nothing worth restoring, or nobody wants it
        return undo_fits(self.num_bytes, free=self._free_host(), wanted=wanted)

    def _require_memory(self) -> None:
        if self.state is WeightsState.RELEASED:
            raise released()

    def _failed(self, journal: Journal, error: Exception) -> CheckpointError:
        """Go back to the old weights; return the error to raise, which says where that led."""
        self._restore(journal)
        return failed(error, is_ready=self.state is WeightsState.READY)

    def _restore(self, journal: Journal) -> None:
        """Undo, or let the state say that what is resident is not what it was."""
        if not undone(journal) and self.state is WeightsState.READY:
            self.state = WeightsState.INCONSISTENT
