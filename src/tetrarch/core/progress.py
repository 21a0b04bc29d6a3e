# SPDX-License-Identifier: Apache-2.0
"""Tell whoever waits how far long work has come, without knowing how it is shown."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """One bar at a time; `commands/` shows it with rich, the engine process as log lines."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a piece of work of `total` units."""
        ...

    def advance(self, amount: int = 1) -> None:
        """Some of it is done."""
        ...

    def finish(self) -> None:
        """All of it is done."""
        ...


class NoProgress:
    """Say nothing."""

    def start(self, label: str, total: int, unit: str) -> None:
        """Ignore."""

    def advance(self, amount: int = 1) -> None:
        """Ignore."""

    def finish(self) -> None:
        """Ignore."""
