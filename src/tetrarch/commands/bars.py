# SPDX-License-Identifier: Apache-2.0
"""Progress bars: the shape of `core.progress.Progress`, drawn by rich on standard error."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from tetrarch.core.units import format_bytes

__all__ = ["Bars"]


class Bars:
    """One bar at a time; on a terminal only, so that logs stay readable."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # else rich leaves an empty line in the log
        )
        self._task: TaskID | None = None
        self._unit, self._done, self._total = "", 0, 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, label: str, total: int, unit: str) -> None:
        """Replace the bar."""
        self.finish()
        self._unit, self._done, self._total = unit, 0, total
        self._task = self._progress.add_task(label, total=total, done=self._text())

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        if self._task is not None:
            self._done += amount
            self._progress.update(self._task, advance=amount, done=self._text())

    def finish(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _text(self) -> str:
        if self._unit == "bytes":
            return f"{format_bytes(self._done)} of {format_bytes(self._total)}"
        return f"{self._done} of {self._total} {self._unit}"
