# SPDX-License-Identifier: Apache-2.0
"""Work that may take long and touches nothing that a step uses, while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tetrarch.core.courtesy import Courtesy
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.replies import other_update

__all__ = ["Job", "OneJob", "Then"]

Then = Callable[[], ControlReply]


class Job:
    """Runs on a thread of its own; what remains to be done is for the engine's thread.

    The thread ends with the process: a peer that never answers holds up nobody's exit.

    Attributes:
        ticket: Of the message that asked for it.
        what: In words: why something else must wait.
        holds_up: Whether messages that come later wait until it is done.
    """

    def __init__(
        self,
        ticket: int,
        what: str,
        work: Callable[[], Then],
        *,
        courtesy: Courtesy,
        holds_up: bool = False,
    ) -> None:
        """Begin.

        Args:
            ticket: Of the message that asked for it.
            what: In words.
            work: Runs on the thread, and returns what comes next, between two steps.
            courtesy: Towards the steps.
            holds_up: Whether what comes later depends on it.
        """
        self.ticket, self.what, self.holds_up = ticket, what, holds_up
        self._work, self._courtesy = work, courtesy
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
            with self._courtesy.guest():
                self._then = self._work()
        except BaseException as error:
            self._error = error


class OneJob:
    """The only job that an engine has at a time, if any.

    Attributes:
        courtesy: What a job shows to the steps.
    """

    def __init__(self) -> None:
        self.courtesy = Courtesy()
        self._job: Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is one."""
        return self._job is not None

    @property
    def holds_up(self) -> bool:
        """Whether what arrives now must wait its turn."""
        return self._job is not None and self._job.holds_up

    def start(
        self, ticket: int, what: str, work: Callable[[], Then], *, holds_up: bool = False
    ) -> None:
        """Begin it, as `Job`.

        Raises:
            RequestError: There is one.
        """
        self.require_none()
        self._job = Job(ticket, what, work, courtesy=self.courtesy, holds_up=holds_up)

    def take(self) -> Job | None:
        """Return the job if it is done, and forget it."""
        if self._job is None or not self._job.is_done:
            return None
        job, self._job = self._job, None
        return job

    def require_none(self) -> None:
        """Raise `RequestError` while there is one."""
        if self._job is not None:
            raise other_update(self._job.what)
