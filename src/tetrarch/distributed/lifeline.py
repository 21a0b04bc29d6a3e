# SPDX-License-Identifier: Apache-2.0
"""A connection to the trainer's store, by which those who wait for others know that it lives."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from tetrarch.core.errors import RequestError
from tetrarch.distributed.meeting import Meeting

__all__ = ["Lifeline", "first_line"]

_RETRY = 0.05  # seconds
_ANSWERS_WITHIN = 2.0  # seconds; a host that drops what it gets says nothing


class Lifeline:
    """Held while ranks meet. It ends with the trainer, or when we cut it.

    torch's own store retries a refused connection until it times out, whether the trainer has not
    come yet or has died. The kernel hangs up for whoever dies; a store sends nothing unasked.
    """

    def __init__(self) -> None:
        self._was_cut = threading.Event()
        self._socket: socket.socket | None = None

    def tie(self, meeting: Meeting, deadline: float) -> None:
        """Return once the store listens, or when somebody has cut this.

        Args:
            meeting: The place.
            deadline: Until when (monotonic seconds).

        Raises:
            RequestError: Nothing listens there by then, or there is no such place.
        """
        place = (meeting.address.strip("[]"), meeting.port)
        while not self._was_cut.wait(0):
            try:
                self._socket = socket.create_connection(place, timeout=_ANSWERS_WITHIN)
                return
            except (ConnectionRefusedError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise _unreachable(meeting, error) from error
                self._was_cut.wait(_RETRY)
            except (OSError, UnicodeError) as error:
                raise _unreachable(meeting, error) from error

    @property
    def is_cut(self) -> bool:
        """Whether the store has hung up, or we."""
        if self._was_cut.is_set() or self._socket is None:
            return self._was_cut.is_set()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        """Return what is readable once it is cut; -1 before it is tied."""
        return -1 if self._socket is None else self._socket.fileno()

    def cut(self) -> None:
        """Let whoever waits give up; from any thread."""
        self._was_cut.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go: nobody waits any more."""
        if self._socket is not None:
            self._socket.close()


def _unreachable(meeting: Meeting, error: Exception) -> RequestError:
    return meeting.error(
        f"nothing can be reached at {meeting.address}:{meeting.port} ({first_line(error)})",
        fix="open the group in the trainer while the servers join, at an address they can reach",
        param="master_address",
    )


def first_line(error: Exception) -> str:
    """Return what an error says, without torch's stack of C++ calls."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
