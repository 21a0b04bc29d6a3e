# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a trainer's group find each other.

Trainers build the group with a helper of their own (`init_custom_process_group` or the like) around
torch's internals, beside the default group: a TCP store at the trainer, keys prefixed with the
group's name, one backend. torch has no public call for that. This file meets the helper on the same
keys with the backend object alone, so that nothing is registered in torch's global state: groups of
any number live side by side, and a name is free again once its group is closed.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tetrarch.distributed.meeting import FILED_UNDER, Meeting

__all__ = ["Backend", "Connection", "connect", "from_trainer", "left"]

_NEVER = timedelta(days=365)


class Backend(Protocol):
    """What we use of torch's backend objects; torch's own stubs leave `broadcast` out."""

    def broadcast(self, tensors: list[Tensor], opts: c10d.BroadcastOptions) -> c10d.Work:
        """Begin to receive, or to send."""
        ...

    def abort(self) -> None:
        """End whatever goes on."""
        ...


class Connection(NamedTuple):
    """What a rank holds of its group."""

    store: c10d.Store
    backend: Backend


def connect(meeting: Meeting, deadline: float) -> Connection:
    """Meet the others. gloo's ranks connect now, nccl's at their first broadcast.

    It waits beyond the deadline, for ever, for what listens but is no store.

    Raises:
        RuntimeError: The others have not come by then (monotonic seconds), torch's own errors.
        ValueError: The same.
    """
    store: c10d.Store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        meeting.address.strip("[]"),
        meeting.port,
        meeting.world_size,
        is_master=False,
        timeout=left(deadline),
    )
    store.set_timeout(left(deadline))
    # As the helpers and torch under them nest them: each prefix gains a slash.
    for prefix in (meeting.name, f"{meeting.name}/", f"{FILED_UNDER[meeting.backend]}/"):
        store = c10d.PrefixStore(prefix, store)
    return Connection(store, _backend(meeting, store, left(deadline)))


def _backend(meeting: Meeting, store: c10d.Store, timeout: timedelta) -> Backend:
    rank, world_size = meeting.rank, meeting.world_size
    if meeting.backend == "gloo":
        return cast("Backend", c10d.ProcessGroupGloo(store, rank, world_size, timeout))
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # pyright: ignore[reportPrivateUsage]  # its watchdog would end us
    return cast("Backend", c10d.ProcessGroupNCCL(store, rank, world_size, options))


def from_trainer(deadline: float) -> c10d.BroadcastOptions:
    """Return how a broadcast of rank 0 is received, by the deadline."""
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = left(deadline)
    return options


def left(deadline: float) -> timedelta:
    """Return the time until a deadline (monotonic seconds); a millisecond where it has passed."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
