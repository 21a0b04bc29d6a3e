# SPDX-License-Identifier: Apache-2.0
"""Work that may take long and touches nothing that a step uses, while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tetrarch.engine.messages import ControlReply

__all__ = ["Job", "Then"]

Then = Callable[[], ControlReply]


class Job:
    """Runs on a thread of its own; what remains to be done is for the engine's thread.

    The thread ends with the process: a peer that never answers holds up nobody's exit.

    Attributes:
        ticket: Of the message that asked for it.
        what: In words: why something else must wait.
    """

    def __init__(self, ticket: int, what: str, work: Callable[[], Then]) -> None:
        """Begin.

        Args:
            ticket: Of the message that asked for it.
            what: In words.
            work: Runs on the thread, and returns what comes next, between two steps.
        """
        self.ticket, self.what = ticket, what
        self._work = work
        self._then: Then | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return not self._thread.is_alive()

    def finish(self) -> ControlReply:
        """Do what remains; on the engine's thread.

        Raises:
            BaseException: Whatever the work, or what remains of it, raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._then is not None
        return self._then()

    def _run(self) -> None:
        try:
            self._then = self._work()
        except BaseException as error:
            self._error = error
