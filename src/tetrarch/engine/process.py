# SPDX-License-Identifier: Apache-2.0
"""The engine as a process of its own: `python -m tetrarch.engine.process`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from tetrarch.config.plan import Plan
from tetrarch.core.progress import Progress
from tetrarch.engine.messages import Ready

__all__ = ["EngineProcess"]


class EngineProcess:
    """Start an engine, and end it; a context manager.

    `wait_ready` before a `Connection` or `AsyncConnection` is made from it.
    """

    def __init__(self, plan: Plan) -> None: ...

    @property
    def pid(self) -> int:
        """The child's process id."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        raise NotImplementedError

    @property
    def exit_code(self) -> int | None:
        """The child's return code; `None` while it runs."""
        raise NotImplementedError

    def wait_ready(self, progress: Progress | None = None) -> Ready:
        """Wait until the weights are loaded, showing how far that has come.

        Raises:
            TetrarchError: What stopped the start, of the class the engine raised.
            EngineDead: The process ended without a word.
        """
        raise NotImplementedError

    def close(self, *, grace: float = 5.0) -> None:
        """End the child, by force after `grace` seconds; remove the sockets. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
