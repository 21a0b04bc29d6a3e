# SPDX-License-Identifier: Apache-2.0
"""A process group with a trainer, over which it broadcasts new weights.

Trainers build the group with a helper of their own (`init_custom_process_group` or the like) around
torch's internals, beside the default group: a TCP store at the trainer, keys prefixed with the
group's name, one backend. torch has no public call for that. This file meets the helper on the same
keys with the backend object alone, so that nothing is registered in torch's global state: groups of
any number live side by side, and a name is free again once its group is closed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread
from typing import NamedTuple, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tetrarch.core.errors import RequestError
from tetrarch.distributed.broadcast import cut, pieces
from tetrarch.distributed.meeting import FILED_UNDER, Meeting

__all__ = ["Meeting", "WeightGroup"]

# A trainer posts the request and opens its store at the same time; seconds it may take.
_OPENS_WITHIN = 20.0
_RETRY = 0.05  # seconds
_POLL = 5e-5  # seconds; NCCL's own blocking wait ends the process when it times out
_GRACE = 1.0  # seconds between torch's own timeout and ours
_SEAL = 8  # bytes
_NEVER = timedelta(days=365)


class _Backend(Protocol):
    """What we use of torch's backend objects; torch's own stubs leave `broadcast` out."""

    def broadcast(self, tensors: list[Tensor], opts: c10d.BroadcastOptions) -> c10d.Work: ...

    def abort(self) -> None: ...


class _Connection(NamedTuple):
    store: c10d.Store
    backend: _Backend


class WeightGroup:
    """Receives what the trainer, rank 0, broadcasts.

    Made by `join`. Any failure breaks the group for good, because ranks that gave up at different
    places no longer agree on what comes next.
    """

    def __init__(self, meeting: Meeting, connection: _Connection, device: torch.device) -> None:
        self.meeting, self.device = meeting, device
        self._connection: _Connection | None = connection

    @classmethod
    def join(cls, meeting: Meeting, *, device: torch.device, timeout: float) -> Self:
        """Meet the trainer, who is opening the group or will within 20 s.

        Args:
            meeting: Place, ranks, name and backend.
            device: Where an nccl group receives; a gloo group receives in host memory.
            timeout: Seconds after which nobody is waited for any more.

        Raises:
            RequestError: The meeting cannot be, or the others did not come in time.
        """
        meeting.check(device)
        deadline = time.monotonic() + timeout
        _await_store(meeting, min(deadline, time.monotonic() + _OPENS_WITHIN))
        try:
            connection = _connected(meeting, deadline)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise meeting.error(
                f"the others did not come within {timeout:g} s ({_first_line(error)})",
                fix="let every rank join with the same name, world size and backend",
            ) from error
        return cls(
            meeting, connection, torch.device("cpu") if meeting.backend == "gloo" else device
        )

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        load_format: str | None,
        timeout: float,
    ) -> dict[str, Tensor]:
        """Receive tensors, all of them or none.

        Args:
            names: Checkpoint names.
            dtypes: Their dtypes as text, `"bfloat16"`.
            shapes: Their shapes.
            load_format: `None`: one broadcast per tensor, in order. `"flattened_bucket"`: one
                broadcast of all their bytes, end to end.
            timeout: Seconds for the whole call.

        Returns:
            Name → tensor, on the CPU (gloo) or the group's device (nccl).

        Raises:
            RequestError: Names, dtypes and shapes do not fit each other, the trainer died or did
                not send in time, or the group is closed or broken.
        """
        expected = pieces(names, dtypes, shapes)
        connection = self._usable()
        sizes = [piece.num_bytes for piece in expected]
        if load_format == "flattened_bucket":
            sizes = [sum(sizes)]
        elif load_format is not None:
            raise self.meeting.error(
                f"load_format {load_format[:80]!r} is not supported",
                fix='leave load_format out, or send "flattened_bucket"',
                param="load_format",
            )
        buffers = self._buffers(sizes)
        deadline = time.monotonic() + timeout
        connection.store.set_timeout(_left(deadline))  # nccl connects at its first broadcast
        try:
            for buffer in buffers:
                self._broadcast(connection.backend, buffer, deadline)
        except (RuntimeError, TimeoutError) as error:
            self.close()
            raise self.meeting.error(
                f"the trainer died, or did not send it all in {timeout:g} s ({_first_line(error)})",
                fix="destroy the group, make it again, and send all weights of the update again",
            ) from error
        return cut(expected, buffers)

    @property
    def is_open(self) -> bool:
        """Whether it can receive: nobody closed it, and no broadcast has failed."""
        return self._connection is not None

    def close(self) -> None:
        """Leave the group. Closing a closed one does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None and self.meeting.backend == "nccl":
            connection.backend.abort()  # its shutdown would wait for the others

    def _usable(self) -> _Connection:
        if self._connection is None:
            raise self.meeting.error(
                "it is closed, or an earlier broadcast failed",
                fix="destroy the group and make it again",
            )
        return self._connection

    def _buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        try:
            return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        except RuntimeError as error:  # torch's out of memory is one
            raise self.meeting.error(
                f"there is no room for {sum(sizes)} bytes",
                fix="send smaller buckets",
                param="shapes",
            ) from error

    def _broadcast(self, backend: _Backend, buffer: Tensor, deadline: float) -> None:
        """Receive bytes, whatever the sender's dtype: gloo knows no FP8; both count bytes."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = _left(deadline)
        # gloo takes a message that is shorter than announced, and leaves the rest as it was.
        seal = torch.frombuffer(bytearray(os.urandom(_SEAL)), dtype=torch.uint8)
        tail = buffer[-_SEAL:]
        if is_sealed := self.meeting.backend == "gloo" and len(tail) == _SEAL:
            tail.copy_(seal)
        work = backend.broadcast([buffer], options)
        if self.meeting.backend == "nccl":
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError("nothing came")
                time.sleep(_POLL)
        work.wait(_left(deadline))
        if is_sealed and torch.equal(tail, seal):
            raise RuntimeError("a tensor was shorter than announced")


def _await_store(meeting: Meeting, deadline: float) -> None:
    """Return once something listens; torch's own store would retry a refusal for minutes."""
    while True:
        try:
            with socket.create_connection((meeting.address.strip("[]"), meeting.port), timeout=2):
                return
        except (ConnectionRefusedError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise _unreachable(meeting, error) from error
            time.sleep(_RETRY)
        except (OSError, UnicodeError) as error:
            raise _unreachable(meeting, error) from error


def _unreachable(meeting: Meeting, error: Exception) -> RequestError:
    return meeting.error(
        f"nothing can be reached at {meeting.address}:{meeting.port} ({_first_line(error)})",
        fix="open the group in the trainer while the servers join, at an address they can reach",
        param="master_address",
    )


def _connected(meeting: Meeting, deadline: float) -> _Connection:
    """Connect on a thread that may be left behind.

    torch's store waits for ever for what listens but is no store; such a thread ends when the other
    side hangs up, and does not keep the process.
    """
    outcome: list[_Connection | Exception] = []

    def connect() -> None:
        try:
            outcome.append(_connect(meeting, deadline))
        except (RuntimeError, ValueError) as error:
            outcome.append(error)

    thread = Thread(target=connect, name=f"join {meeting.name}", daemon=True)
    thread.start()
    thread.join(_left(deadline).total_seconds() + _GRACE)
    if not outcome:
        raise TimeoutError("what listens there does not answer as a store")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _connect(meeting: Meeting, deadline: float) -> _Connection:
    store: c10d.Store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        meeting.address.strip("[]"),
        meeting.port,
        meeting.world_size,
        is_master=False,
        timeout=_left(deadline),
    )
    store.set_timeout(_left(deadline))
    # As the helpers and torch under them nest them: each prefix gains a slash.
    for prefix in (meeting.name, f"{meeting.name}/", f"{FILED_UNDER[meeting.backend]}/"):
        store = c10d.PrefixStore(prefix, store)
    return _Connection(store, _backend(meeting, store, _left(deadline)))


def _backend(meeting: Meeting, store: c10d.Store, timeout: timedelta) -> _Backend:
    rank, world_size = meeting.rank, meeting.world_size
    if meeting.backend == "gloo":
        return cast("_Backend", c10d.ProcessGroupGloo(store, rank, world_size, timeout))
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # pyright: ignore[reportPrivateUsage]  # its watchdog would end us
    return cast("_Backend", c10d.ProcessGroupNCCL(store, rank, world_size, options))


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
