# SPDX-License-Identifier: Apache-2.0
"""What an update of weights is: planned, open, done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tetrarch.core.errors import CheckpointError, ConfigError
from tetrarch.core.log import get_logger
from tetrarch.core.units import format_bytes
from tetrarch.memory.journal import Journal
from tetrarch.models.placement import Placements
from tetrarch.models.report import LoadReport, Unused
from tetrarch.models.sources import Source
from tetrarch.models.update import LiveUpdate, Pieces

__all__ = [
    "DiskUpdate",
    "Received",
    "Session",
    "UpdateReport",
    "WeightsState",
    "failed",
    "released",
    "undo_fits",
    "undone",
    "unreadable",
]

_log = get_logger(__name__)
_RESERVE = 256 * 2**20  # host bytes that an undo copy leaves to everybody else


class WeightsState(StrEnum):
    """Whether a forward may use the weights; all but `READY` are codes of a 503."""

    READY = "ready"
    RELEASED = "weights_released"  # their memory is lent
    NOT_LOADED = "weights_not_loaded"  # their memory is back, its contents are undefined
    INCONSISTENT = "weights_inconsistent"  # an update failed half-way, and could not be undone


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUpdate:
    """A planned update: everything that headers can tell has been checked.

    Attributes:
        path: The folder.
        source: Its tensors, unread.
        placements: Where they go.
        atomic: A failure will restore the old weights. Not where the host has no room for a
            copy of them, nor where they are not worth restoring.
        seconds: That planning took.
    """

    path: str
    source: Source
    placements: Placements
    atomic: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What an update did.

    Attributes:
        atomic: It could have been undone.
        num_tensors, num_bytes: Read or received, as stored, without those that were left out.
        unused: Names of these, by kind.
        seconds: From the first write to the last, planning left out.
        load: Of an update from disk.
    """

    atomic: bool
    num_tensors: int
    num_bytes: int
    seconds: float
    unused: Mapping[Unused, tuple[str, ...]]
    load: LoadReport | None = None


class Session:
    """An update by tensors that is open."""

    def __init__(self, update: LiveUpdate, journal: Journal) -> None:
        self.update, self.journal = update, journal
        self._began = time.perf_counter()

    @property
    def is_atomic(self) -> bool:
        """Whether a failure will restore the old weights."""
        return self.journal.keeps

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._began

    def report(self) -> UpdateReport:
        """Return what has come of it."""
        return UpdateReport(
            atomic=self.is_atomic,
            num_tensors=self.update.num_tensors,
            num_bytes=self.update.num_bytes,
            seconds=self.age_s,
            unused=self.update.unused,
        )


@dataclass(frozen=True, slots=True)
class Received:
    """The tensors of one call, checked and quantized; nothing of them is written.

    Attributes:
        session: The update that they belong to; not open yet if they are its first.
        error: What their values were refused for. The update is lost with them.
    """

    session: Session
    pieces: Pieces
    error: Exception | None = None


def failed(error: Exception, *, is_ready: bool) -> CheckpointError:
    """Return the error of an update that is over; `is_ready`: with the old weights in place."""
    if isinstance(error, CheckpointError):
        what, why, fix = error.what, error.why, error.fix
    else:  # a disk, a file that shrinks, memory that runs out: whatever reading may raise
        what, why, fix = "writing the new weights failed", repr(error), "try again"
    outcome = "the old weights are served" if is_ready else "a full update must follow"
    return CheckpointError(what, why=f"{why}; {outcome}", fix=fix)


def released() -> ConfigError:
    """Refuse what needs the weights' memory."""
    return ConfigError(
        "the weights are released",
        why="their memory is lent, and there is nothing to read or to write",
        fix="POST /resume_memory_occupation with the tag weights first",
    )


def undo_fits(num_bytes: int, *, free: int, wanted: bool | None) -> bool:
    """Return whether the host has room for an undo copy.

    Args:
        num_bytes: Of the copy.
        free: Bytes of host memory that may be taken.
        wanted: Somebody demands it.

    Raises:
        ConfigError: It was demanded and does not fit.
    """
    need = num_bytes + _RESERVE
    if need > free and wanted:
        raise ConfigError(
            f"an undo copy of {format_bytes(num_bytes)} does not fit in host memory",
            why=f"{format_bytes(free)} are free, of which {format_bytes(_RESERVE)} stay so",
            fix='send "atomic": false, or leave it out: a failure then cannot be undone',
        )
    return need <= free


def undone(journal: Journal) -> bool:
    """Go back to what was there before the writes of `journal`; return whether that worked."""
    if journal.is_empty:
        return True
    try:
        if journal.keeps:
            journal.undo()
            return True
        _log.error("an update failed half-way, and there is no undo copy")
    except Exception as error:
        _log.error("the old weights could not be restored", exc_info=error)
    return False


def unreadable(path: str, error: Exception) -> CheckpointError:
    """Refuse a folder whose files hold what nobody expected."""
    return CheckpointError(
        f"{path!r} cannot be read as a checkpoint",
        why=f"{type(error).__name__}: {error}",
        fix="check its files; nothing was written",
    )
