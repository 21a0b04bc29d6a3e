# SPDX-License-Identifier: Apache-2.0
"""A process group with a trainer, over which it broadcasts new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from tetrarch.distributed.broadcast import Piece, cut, pieces, seal
from tetrarch.distributed.gloo import GlooLink
from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.nccl import NcclLink
from tetrarch.distributed.parcel import Broadcast
from tetrarch.distributed.rendezvous import await_store, first_line

__all__ = ["Link", "Meeting", "WeightGroup"]

# A trainer posts the request and opens its store at the same time; seconds it may take.
_OPENS_WITHIN = 20.0


class Link(Protocol):
    """A rank's end of a group. After a failed broadcast it is of no use but to be closed."""

    @property
    def is_alive(self) -> bool:
        """Whether it can receive, as far as can be said without trying."""
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
        """Leave the group, from any thread; a `receive` that waits fails. Once is enough."""
        ...


_LINKS: Mapping[str, Callable[[Meeting, torch.device, float], Link]] = {
    "gloo": lambda meeting, _, timeout: GlooLink.join(meeting, timeout),
    "nccl": NcclLink.join,
}


class WeightGroup:
    """Receives what the trainer, rank 0, broadcasts.

    Made by `join`. Any failure breaks the group for good, because ranks that gave up at different
    places no longer agree on what comes next.
    """

    def __init__(self, meeting: Meeting, link: Link) -> None:
        self.meeting, self._link = meeting, link

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
        began = time.monotonic()
        await_store(meeting, began + min(timeout, _OPENS_WITHIN))
        try:
            link = _LINKS[meeting.backend](meeting, device, began + timeout - time.monotonic())
        except (RuntimeError, ValueError, OSError) as error:
            raise meeting.error(
                f"the others did not come within {timeout:g} s ({first_line(error)})",
                fix="let every rank join with the same name, world size and backend",
            ) from error
        return cls(meeting, link)

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
        if not self._link.is_alive:
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
            self.close()
            raise self.meeting.error(
                f"the trainer died, did not send it all in {timeout:g} s, or sent something else "
                f"than it announced ({first_line(error)})",
                fix=_AGAIN,
            ) from error
        return cut(expected, buffers)

    @property
    def is_open(self) -> bool:
        """Whether it can receive: nobody closed it, and no broadcast has failed."""
        return self._link.is_alive

    def close(self) -> None:
        """Leave the group. Closing a closed one does nothing."""
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
