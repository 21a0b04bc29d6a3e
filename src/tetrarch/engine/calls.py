# SPDX-License-Identifier: Apache-2.0
"""What the calls of one update by tensors have asked for, and how long nobody has called."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from tetrarch.core.errors import TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.engine.actions import Selector, UpdateFromDistributed, UpdateFromTensors
from tetrarch.engine.messages import Heartbeat

__all__ = ["ABANDON_S", "REMIND_S", "Calls", "Refusals"]

_log = get_logger(__name__)
ABANDON_S = 300.0  # without a call; then nobody waits for the rest of an implicit update
REMIND_S = 60.0  # without a call; then the log says what an explicit update holds up


class Calls:
    """The calls of an update that is open.

    Attributes:
        is_explicit: Somebody began it, and only its end ends it.
        selector: Whose tensors it takes.
        source: How the last tensors came, as metrics name it.
        version: The last one named.
        flush: Whether one of them did not want old keys and values to live on.
    """

    def __init__(self, *, is_explicit: bool, selector: Selector = "all") -> None:
        self.is_explicit, self.selector = is_explicit, selector
        self.source = "tensor"
        self.version: str | None = None
        self.flush = False
        self._began = self._last = self._reminded = time.monotonic()

    def note(self, message: UpdateFromTensors | UpdateFromDistributed) -> None:
        """Note a call that has been taken."""
        self.source = "tensor" if isinstance(message, UpdateFromTensors) else "distributed"
        self.version = message.weight_version or self.version
        self.flush |= message.flush_cache
        self._last = self._reminded = time.monotonic()

    @property
    def patience(self) -> float:
        """Seconds until it is to be given up, if implicit, or to be reminded of."""
        due = self._reminded + REMIND_S if self.is_explicit else self._last + ABANDON_S
        return max(0.0, due - time.monotonic())

    def remind(self, load: Heartbeat) -> None:
        """Say in the log that an explicit update is open, and how many requests wait."""
        now = self._reminded = time.monotonic()
        _log.warning(
            "an update is open for %.0f s, and %.0f s have passed without a call: nothing runs, "
            "%d requests wait; POST /end_weight_update ends it",
            now - self._began,
            now - self._last,
            load.num_running + load.num_waiting,
        )


class Refusals:
    """Calls that were refused since the last update that was done.

    A trainer that overlooks a 400 goes on with the next tensors, and what it ends is an update
    that lacks some. Nobody can tell that from one that was meant to be small; it can be said.
    """

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count a refusal that this block raises."""
        try:
            yield
        except TetrarchError:
            self._count += 1
            raise

    def told(self) -> list[str]:
        """Return what the client of an update that is done should know; then forget it."""
        count, self._count = self._count, 0
        if count == 0:
            return []
        calls = "1 call was" if count == 1 else f"{count} calls were"
        words = (
            f"{calls} refused before this update was done: it lacks their tensors, and "
            "those of an update that was taken back with them, unless they were sent again"
        )
        _log.warning("%s", words)
        return [words]
