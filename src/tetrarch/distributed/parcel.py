# SPDX-License-Identifier: Apache-2.0
"""Broadcasts that are received together, and the memory that two processes share for them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Broadcast", "Parcel", "parcels"]

# A tensor that is kept keeps its parcel, so large tensors travel alone. 50,000 tensors of 1 MiB
# stay under the 65,530 mappings that a process may have.
_FULL = 1 << 20  # bytes
_MOST = 1024  # broadcasts; what is said of them fits in a socket's buffer
_ALIGNMENT = 64  # bytes


class Broadcast(NamedTuple):
    """What is known of a broadcast beforehand.

    Attributes:
        num_bytes: Of it.
        seal: Bytes in which it cannot end, no more than it has. Whoever still finds them at the end
            of memory that held them before has received less. Empty: there are none.
    """

    num_bytes: int
    seal: bytes


class Parcel(NamedTuple):
    """Broadcasts that follow each other, and lie in one piece of memory."""

    broadcasts: Sequence[Broadcast]

    @property
    def num_bytes(self) -> int:
        """Size of the memory; 1 at least, for an empty one cannot be mapped."""
        return max(1, sum(map(_room, self.broadcasts)))

    def allocate(self) -> int:
        """Return the descriptor of memory that lasts as long as somebody maps it.

        It is no file of `/dev/shm`, which containers keep small (64 MiB).

        Raises:
            OSError: There is no room.
        """
        memory = os.memfd_create("tetrarch-weights")
        os.ftruncate(memory, self.num_bytes)
        return memory

    def map(self, memory: int) -> list[Tensor]:
        """Return the broadcasts as uint8 `[bytes]`, at 64-byte boundaries of the memory.

        It stays mapped as long as one of them lives.

        Raises:
            OSError: It cannot be mapped.
        """
        mapped = mmap.mmap(memory, self.num_bytes)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        tensors: list[Tensor] = []
        start = 0
        for broadcast in self.broadcasts:
            tensors.append(whole[start : start + broadcast.num_bytes])
            start += _room(broadcast)
        return tensors


def parcels(broadcasts: Sequence[Broadcast]) -> Iterator[Parcel]:
    """Group broadcasts in their order: large ones alone, small ones together."""
    some: list[Broadcast] = []
    size = 0
    for broadcast in broadcasts:
        if some and (broadcast.num_bytes >= _FULL or size >= _FULL or len(some) == _MOST):
            yield Parcel(some)
            some, size = [], 0
        some.append(broadcast)
        size += broadcast.num_bytes
    if some:
        yield Parcel(some)


def _room(broadcast: Broadcast) -> int:
    return -(-broadcast.num_bytes // _ALIGNMENT) * _ALIGNMENT
