# SPDX-License-Identifier: Apache-2.0
"""A process group with a trainer, over which it broadcasts new weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.distributed.broadcast import Piece, cut, pieces, seal
from tetrarch.distributed.gloo import GlooLink
from tetrarch.distributed.lifeline import Lifeline, first_line
from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.nccl import NcclLink
from tetrarch.distributed.parcel import Broadcast

__all__ = ["Link", "Meeting", "WeightGroup"]

# A trainer posts the request and opens its store at the same time; seconds it may take.
_OPENS_WITHIN = 20.0


class Link(Protocol):
    """A rank's end of a group, joined once. After any failure it is only good to be closed."""

    @property
    def is_alive(self) -> bool:
        """Whether it can receive, as far as can be said without trying."""
        ...

    def join(self, meeting: Meeting, lifeline: Lifeline, timeout: float) -> None:
        """Meet the others, as soon as the backend does so.

        Args:
            meeting: The place.
            lifeline: To the trainer's store; closed here when it is of no use any more.
            timeout: Seconds in which the others must come.

        Raises:
            RuntimeError, ValueError: What listens is no store, or has no place for us.
            OSError: The others did not come in time, or the lifeline was cut.
        """
        ...

    def receive(self, broadcasts: Sequence[Broadcast], timeout: float) -> list[Tensor]:
        """Receive broadcasts of rank 0.

        Args:
            broadcasts: In their order.
            timeout: Seconds for all of them.

        Returns:
            uint8 `[bytes]` for each.

        Raises:
            MemoryError: There is no room; nothing has begun, and the link is as before.
            RuntimeError: The trainer or the link died, or something else came.
            OSError: The same, or it took too long.
        """
        ...

    def close(self) -> None:
        """Leave the group, from any thread; who waits in it fails. Once is enough."""
        ...


_LINKS: Mapping[str, Callable[[torch.device], Link]] = {
    "gloo": lambda _: GlooLink(),
    "nccl": NcclLink,
}


class WeightGroup:
    """Receives what the trainer, rank 0, broadcasts.

    It is joined once. Any failure breaks the group for good, because ranks that gave up at
    different places no longer agree on what comes next.
    """

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Begin.

        Args:
            meeting: Place, ranks, name and backend.
            device: Where an nccl group receives; a gloo group receives in host memory.

        Raises:
            RequestError: The meeting cannot be.
        """
        meeting.check(device)
        self.meeting, self._device = meeting, device
        self._lifeline = Lifeline()
        self._link: Link | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # nothing is started once it is closed

    def join(self, timeout: float) -> None:
        """Meet the trainer, who is opening the group or will within 20 s.

        Args:
            timeout: Seconds after which nobody is waited for any more.

        Raises:
            RequestError: The others did not come in time, the trainer died, or another thread
                closed the group.
        """
        began = time.monotonic()
        try:
            self._lifeline.tie(self.meeting, began + min(timeout, _OPENS_WITHIN))
            link = self._start_link()
            link.join(self.meeting, self._lifeline, began + timeout - time.monotonic())
        except (RequestError, RuntimeError, ValueError, OSError) as error:
            refusal = self._not_joined(error, timeout)
            self.close()
            self._lifeline.close()
            raise refusal from error

    def _start_link(self) -> Link:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("it is closed")
            self._link = _LINKS[self.meeting.backend](self._device)
            return self._link

    def _not_joined(self, error: Exception, timeout: float) -> RequestError:
        if self._is_closed:
            return self.meeting.error("it was destroyed while it was being joined", fix=_AGAIN)
        if isinstance(error, RequestError):
            return error
        return self.meeting.error(
            f"the others did not come within {timeout:g} s, or the trainer died "
            f"({first_line(error)})",
            fix="let every rank join with the same name, world size and backend",
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
            RequestError: Names, dtypes and shapes do not fit each other, the trainer died, did not
                send in time or sent something else, or the group is closed or broken.
        """
        expected = pieces(names, dtypes, shapes)
        broadcasts = self._broadcasts(expected, load_format)
        if self._link is None or not self.is_open:
            raise self.meeting.error("it is closed, or an earlier broadcast failed", fix=_AGAIN)
        try:
            buffers = self._link.receive(broadcasts, timeout)
        except MemoryError as error:
            raise self.meeting.error(
                f"there is no room for {sum(one.num_bytes for one in broadcasts)} bytes",
                fix="send smaller buckets",
                param="shapes",
            ) from error
        except (RuntimeError, OSError) as error:
            refusal = self._not_received(error, timeout)
            self.close()
            raise refusal from error
        return cut(expected, buffers)

    def _not_received(self, error: Exception, timeout: float) -> RequestError:
        if self._is_closed:
            return self.meeting.error("it was destroyed while it was receiving", fix=_AGAIN)
        return self.meeting.error(
            f"the trainer died, did not send it all in {timeout:g} s, or sent something else "
            f"than it announced ({first_line(error)})",
            fix=_AGAIN,
        )

    @property
    def is_open(self) -> bool:
        """Whether it can receive, or will: nobody closed it, and nothing has failed."""
        return not self._is_closed and (self._link is None or self._link.is_alive)

    def close(self) -> None:
        """Leave the group, or give up joining it; from any thread. Once is enough."""
        with self._lock:
            self._is_closed = True
        self._lifeline.cut()
        if self._link is not None:
            self._link.close()

    def _broadcasts(self, expected: Sequence[Piece], load_format: str | None) -> list[Broadcast]:
        one_each = [Broadcast(piece.num_bytes, seal(piece)) for piece in expected]
        if load_format is None:
            return one_each
        if load_format == "flattened_bucket":
            last = [one.seal for one in one_each if one.num_bytes][-1:]
            return [Broadcast(sum(one.num_bytes for one in one_each), b"".join(last))]
        raise self.meeting.error(
            f"load_format {load_format[:80]!r} is not supported",
            fix='leave load_format out, or send "flattened_bucket"',
            param="load_format",
        )


_AGAIN = "POST /init_weights_update_group again, and send all weights of the update again"
