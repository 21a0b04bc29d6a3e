# SPDX-License-Identifier: Apache-2.0
"""gloo, at arm's length: a process of its own receives, and its memory comes here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.reduction import recv_handle
from typing import TypeVar

from torch import Tensor

from tetrarch.distributed.lifeline import Lifeline
from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.parcel import Broadcast, Parcel, parcels

__all__ = ["GlooLink"]

_STARTS_WITHIN = 60.0  # seconds; it imports torch, 2 s on a quiet machine
_GRACE = 1.0  # seconds between torch's own timeout and ours
_STDERR = 2
_T = TypeVar("_T")


class GlooLink:
    """A `Link` whose other end is `receiver.py`.

    The process ends with this object, and with this process, however that ends: the pipe closes.
    """

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "tetrarch.distributed.receiver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what gloo prints must not mix with a command's output
                pass_fds=[theirs.fileno()],
            )

    def join(self, meeting: Meeting, lifeline: Lifeline, timeout: float) -> None:
        """Meet the others; as `Link.join` says."""
        try:
            self._await(_STARTS_WITHIN, lifeline)
            self._ask(meeting, timeout, lifeline)
        finally:
            lifeline.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process that receives lives."""
        return self._child.poll() is None

    def receive(self, broadcasts: Sequence[Broadcast], timeout: float) -> list[Tensor]:
        """Receive broadcasts of rank 0; as `Link.receive` says."""
        if sum(one.num_bytes for one in broadcasts) > os.sysconf("SC_PHYS_PAGES") * os.sysconf(
            "SC_PAGE_SIZE"
        ):
            raise MemoryError
        deadline = time.monotonic() + timeout
        buffers: list[Tensor] = []
        for parcel in parcels(broadcasts):
            buffers += self._receive(parcel, max(deadline - time.monotonic(), 0.0))
        return buffers

    def close(self) -> None:
        """End the process; as `Link.close` says. The pipe stays, for another thread may read it."""
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_GRACE)

    def _receive(self, parcel: Parcel, timeout: float) -> list[Tensor]:
        self._ask(parcel, timeout)
        memory = self._heard(recv_handle)
        try:
            return parcel.map(memory)
        finally:
            os.close(memory)

    def _ask(self, what: Meeting | Parcel, timeout: float, *lifelines: Lifeline) -> None:
        self._heard(lambda pipe: pipe.send((what, timeout)))
        self._await(timeout, *lifelines)

    def _await(self, timeout: float, *lifelines: Lifeline) -> None:
        """Wait for its answer, as long as lifelines hold; without words all went well."""
        ready = wait([self._pipe, *(line.fileno() for line in lifelines)], timeout + _GRACE)
        if not ready:
            raise TimeoutError("the process that receives does not answer")
        if self._pipe not in ready:
            raise ConnectionError("the trainer's store has hung up")
        if words := self._heard(Pipe.recv):
            raise RuntimeError(words)

    def _heard(self, talk: Callable[[Pipe], _T]) -> _T:
        try:
            return talk(self._pipe)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(self._fate()) from error

    def _fate(self) -> str:
        try:
            code = self._child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "the process that receives has hung up"
        if code == -signal.SIGABRT:
            return "more bytes came than were announced, and gloo gave up"
        return f"the process that receives has ended: code {code}"
