# SPDX-License-Identifier: Apache-2.0
"""What a resolution decided, and what it had to refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tetrarch.config.plan import Decision
from tetrarch.core.errors import LaunchErrors, TetrarchError

__all__ = ["ASKED", "Ledger"]

T = TypeVar("T")
ASKED = "asked for"


class Ledger:
    """Collects decisions and errors, so that one launch reports all of them."""

    def __init__(self, errors: Sequence[TetrarchError] = ()) -> None:
        self.decisions: list[Decision] = []
        self.errors: list[TetrarchError] = list(errors)

    def decide(self, field: str, value: object, why: str) -> None:
        """Record what was settled, and why."""
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        self.decisions.append(Decision(field, shown, why))

    def pick(self, field: str, asked: T | None, default: T, why: str) -> T:
        """Return what was asked for, else the default; record which of the two."""
        value = default if asked is None else asked
        self.decide(field, value, why if asked is None else ASKED)
        return value

    def refuse(self, error: TetrarchError) -> None:
        """Record an error and go on."""
        self.errors.extend(error.errors if isinstance(error, LaunchErrors) else (error,))

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Run a step whose result later steps need; `None` where it was refused."""
        try:
            return step()
        except TetrarchError as error:
            self.refuse(error)
            return None
