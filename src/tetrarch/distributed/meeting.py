# SPDX-License-Identifier: Apache-2.0
"""Where a trainer and its servers meet, as the trainer says it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tetrarch.core.errors import RequestError

__all__ = ["FILED_UNDER", "Meeting"]

# The device under which torch files a backend that serves all of a group's devices: the first.
FILED_UNDER = {"gloo": "cpu", "nccl": "cuda"}


@dataclass(frozen=True)
class Meeting:
    """Where a trainer and its servers meet.

    Attributes:
        address: Host of the trainer's store.
        port: Of the store.
        rank: Ours; the trainer, who broadcasts, is 0.
        world_size: Trainer and servers' ranks together.
        name: Of the group.
        backend: `"gloo"` or `"nccl"`.
    """

    address: str
    port: int
    rank: int
    world_size: int
    name: str
    backend: str

    def check(self, device: torch.device) -> None:
        """Raise `RequestError` if nobody could meet here."""
        problems = {
            "backend": (self.backend not in FILED_UNDER, "torch groups here are gloo or nccl"),
            "master_address": (not self.address, "the trainer's host is missing"),
            "master_port": (not 0 < self.port < 2**16, "ports run from 1 to 65535"),
            "group_name": (not self.name, "a group needs a name"),
            "world_size": (self.world_size < 2, "the trainer and one server make two"),
            "rank_offset": (
                not 0 < self.rank < self.world_size,
                f"rank {self.rank} of {self.world_size}: the trainer is 0, servers follow",
            ),
        }
        for param, (is_wrong, why) in problems.items():
            if is_wrong:
                raise self.error(why, fix=f"correct {param}", param=param)
        if self.backend == "nccl" and not (device.type == "cuda" and dist.is_nccl_available()):
            raise self.error(
                "nccl needs CUDA, and this server runs on a CPU",
                fix='send backend "gloo"',
                param="backend",
            )

    def error(self, why: str, *, fix: str, param: str | None = None) -> RequestError:
        """Return the error of a group that cannot be made or used."""
        return RequestError(
            f"weight group {self.name[:80]!r} cannot be used", why=why, fix=fix, param=param
        )
