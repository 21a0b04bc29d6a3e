# SPDX-License-Identifier: Apache-2.0
"""Memory that can be given back to the system and taken again at the same addresses.

Whoever captured an address, or holds a tensor, may keep it: between `release` and `resume` there
is nothing behind it, and afterwards there is memory again. What it held is gone, unless it was
kept.

    HostArena    private mappings of a CPU's memory; MADV_DONTNEED drops their pages
    SaverArena   CUDA memory whose physical pages torch_memory_saver unmaps (memory/saver.py)
    FixedArena   ordinary CUDA memory, which stays (memory/saver.py)
"""

from __future__ import annotations

import mmap
import tempfile
from abc import ABC, abstractmethod
from io import FileIO

import torch
from torch import Tensor

from tetrarch.core.errors import MemoryRefused
from tetrarch.core.specs import TensorSpec
from tetrarch.core.units import MIB, align_up, format_bytes

__all__ = ["Arena", "HostArena"]

_CHUNK = MIB  # a tensor of this size has a mapping of its own, smaller ones share one
_ALIGN = 64  # bytes: a cache line, and an AVX-512 register; torch's own allocator does the same


class Arena(ABC):
    """Hands out the tensors of one region on one device."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_released = False

    def empty(self, spec: TensorSpec) -> Tensor:
        """Allocate a tensor, uninitialised, whose address outlives releases.

        Raises:
            MemoryRefused: The system does not give that much.
            ValueError: The arena is released.
        """
        if self.is_released:
            raise ValueError("cannot allocate in a released arena")
        with torch.inference_mode(mode=False):  # inference tensors reject in-place writes later
            tensor = self._allocate(spec)
        self.num_bytes += spec.num_bytes
        return tensor

    def release(self) -> int:
        """Give the memory back; when this returns, others can have it. Nobody may use a tensor.

        Returns:
            Bytes of the arena's tensors.

        Raises:
            ConfigError: This memory cannot be given back.
            ValueError: It already was.
        """
        if self.is_released:
            raise ValueError("the arena is already released")
        self._give_back()
        self.is_released = True
        return self.num_bytes

    def resume(self) -> None:
        """Take memory again, and put in it what `keep` kept; otherwise it holds nothing useful.

        Raises:
            MemoryRefused: What was kept cannot be read; the arena stays released.
            ValueError: The arena is not released.
        """
        if not self.is_released:
            raise ValueError("the arena is not released")
        self._take_again()
        self.is_released = False

    @abstractmethod
    def keep(self) -> None:
        """Put the contents aside for the next release.

        Raises:
            ConfigError: This arena cannot keep contents.
            MemoryRefused: There is no room for them.
        """

    @abstractmethod
    def _allocate(self, spec: TensorSpec) -> Tensor: ...

    @abstractmethod
    def _give_back(self) -> None: ...

    @abstractmethod
    def _take_again(self) -> None: ...


class HostArena(Arena):
    """CPU memory in private anonymous mappings.

    A tensor of 1 MiB or more has its own, smaller ones are packed. A mapping lives as long as the
    arena or one of its tensors. Contents are kept in an unlinked file in the folder for temporary
    files (`TMPDIR`), because a copy in memory would give nothing back. After a release without
    `keep` the tensors are zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mappings: list[mmap.mmap] = []
        self._chunk: mmap.mmap | None = None  # where small tensors go, and how full it is
        self._used = 0
        self._kept: FileIO | None = None

    def _allocate(self, spec: TensorSpec) -> Tensor:
        if spec.device.type != "cpu":
            raise ValueError(f"a host arena cannot hold a tensor on {spec.device}")
        if spec.num_bytes == 0:
            return spec.empty()
        mapping, offset = self._place(spec.num_bytes)
        count = torch.Size(spec.shape).numel()
        flat = torch.frombuffer(mapping, dtype=spec.dtype, count=count, offset=offset)
        return flat.resize_(spec.shape)  # as many elements: nothing moves, and it is no view

    def _place(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        if num_bytes >= _CHUNK:
            return self._map(num_bytes), 0
        if self._chunk is None or self._used + num_bytes > _CHUNK:
            self._chunk, self._used = self._map(_CHUNK), 0
        offset = self._used
        self._used = align_up(offset + num_bytes, _ALIGN)
        return self._chunk, offset

    def _map(self, num_bytes: int) -> mmap.mmap:
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryRefused(
                f"cannot allocate {format_bytes(num_bytes)} of memory",
                why=str(error),
                fix="serve a smaller model or KV cache, or use a machine with more memory",
            ) from error
        self._mappings.append(mapping)
        return mapping

    def keep(self) -> None:
        """Write everything to a file. See the base class."""
        self._forget()
        folder = tempfile.gettempdir()
        try:
            # Unbuffered: what is written is written, and closing after a failure cannot fail.
            self._kept = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
            for mapping in self._mappings:
                _write(self._kept, memoryview(mapping))
        except OSError as error:
            self._forget()
            raise MemoryRefused(
                f"cannot keep {format_bytes(self.num_bytes)} in {folder}",
                why=str(error),
                fix="point TMPDIR to a disk with more room, or release without a backup",
            ) from error

    def _give_back(self) -> None:
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)

    def _take_again(self) -> None:
        if self._kept is None:
            return
        try:
            self._kept.seek(0)
            for mapping in self._mappings:
                _read(self._kept, memoryview(mapping))
        except OSError as error:
            self._give_back()
            raise MemoryRefused(
                f"cannot read back the {format_bytes(self.num_bytes)} that were kept",
                why=str(error),
                fix="try again, or restart the server",
            ) from error
        self._forget()

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def _write(file: FileIO, view: memoryview) -> None:
    while view:  # one call writes 2 GiB at most
        view = view[file.write(view) :]


def _read(file: FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError("the file ends too early")
        view = view[count:]
