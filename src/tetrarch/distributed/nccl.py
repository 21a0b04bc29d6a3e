# SPDX-License-Identifier: Apache-2.0
"""nccl, in this process: what it receives must lie in our device memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tetrarch.distributed.lifeline import Lifeline
from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.parcel import Broadcast
from tetrarch.distributed.rendezvous import Connection, connect, from_trainer, left

__all__ = ["NcclLink", "within"]

_POLL = 5e-5  # seconds; NCCL's own blocking wait ends the process when it times out
_LOOK = 0.05  # seconds between two looks at a lifeline
_GRACE = 1.0  # seconds between torch's own timeout and ours
_T = TypeVar("_T")


class NcclLink:
    """A `Link` between GPUs, which meet at the first broadcast; until then the lifeline is held."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lifeline = Lifeline()
        self._connection: Connection | None = None
        self._is_alive = True
        self._has_met = False  # all ranks, on their devices
        self._is_meeting = False

    def join(self, meeting: Meeting, lifeline: Lifeline, timeout: float) -> None:
        """Meet the trainer's store; as `Link.join` says."""
        deadline = time.monotonic() + timeout
        self._lifeline = lifeline
        self._connection = within(deadline, partial(connect, meeting, deadline), lifeline)

    @property
    def is_alive(self) -> bool:
        """Whether nobody has closed it."""
        return self._is_alive

    def receive(self, broadcasts: Sequence[Broadcast], timeout: float) -> list[Tensor]:
        """Receive broadcasts of rank 0, on the device; as `Link.receive` says."""
        try:
            buffers = [
                torch.empty(one.num_bytes, dtype=torch.uint8, device=self._device)
                for one in broadcasts
            ]
        except RuntimeError as error:  # torch's out of memory is one
            raise MemoryError from error
        deadline = time.monotonic() + timeout
        for buffer in buffers:
            work = self._begin(buffer, deadline)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError("nothing came")
                time.sleep(_POLL)
            work.wait(left(deadline))
        return buffers

    def close(self) -> None:
        """Leave the group; as `Link.close` says."""
        if self._is_alive and not self._is_meeting and self._connection is not None:
            self._connection.backend.abort()  # its shutdown would wait for the others
        self._is_alive = False
        self._lifeline.cut()
        if not self._is_meeting:
            self._lifeline.close()

    def _begin(self, buffer: Tensor, deadline: float) -> c10d.Work:
        assert self._connection is not None
        store, backend = self._connection
        begin = partial(backend.broadcast, [buffer], from_trainer(deadline))
        if self._has_met:
            return begin()
        store.set_timeout(left(deadline))
        self._is_meeting = True
        work = within(deadline, begin, self._lifeline)
        self._lifeline.close()
        self._has_met, self._is_meeting = True, False
        return work


def within(deadline: float, act: Callable[[], _T], lifeline: Lifeline) -> _T:
    """Do something that may wait for others for ever, on a thread that may be left behind.

    So does torch's store for what listens but is no store, until that hangs up; and NCCL for a rank
    that never comes, even when all others have gone. Such a thread does not keep the process.

    Raises:
        RuntimeError, ValueError: The act's own.
        TimeoutError: It was not done a second after the deadline (monotonic seconds).
        ConnectionError: The lifeline was cut before.
    """
    outcome: list[_T | Exception] = []

    def run() -> None:
        try:
            outcome.append(act())
        except (RuntimeError, ValueError) as error:
            outcome.append(error)

    thread = Thread(target=run, name="meet the ranks of a group", daemon=True)
    thread.start()
    is_cut = False
    while thread.is_alive() and not is_cut and time.monotonic() < deadline + _GRACE:
        thread.join(_LOOK)
        is_cut = lifeline.is_cut
    if not outcome and is_cut:
        raise ConnectionError("the trainer's store has hung up")
    if not outcome:
        raise TimeoutError("the others do not answer")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
