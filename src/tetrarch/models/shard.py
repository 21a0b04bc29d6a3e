# SPDX-License-Identifier: Apache-2.0
"""One safetensors file, read tensor by tensor.

Tensors are read, not mapped. A mapped file that shrinks, or a disk that fails, ends the process
with a signal; a read that comes short is an error like any other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tetrarch.config.files import open_file
from tetrarch.core.errors import CheckpointError

__all__ = ["Shard"]

_MOST_VIEWS = 1024  # of one call: IOV_MAX


class Shard:
    """An open file. What replaces it under its name is not seen; what changes it is noticed.

    Raises:
        CheckpointError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open_file(path)
        except OSError as error:
            raise self._unreadable(str(path), error) from error
        self._seen = self._stamp()

    def read(self, name: str, offset: int, num_bytes: int) -> Tensor:
        """Return the bytes of a tensor: (num_bytes,) uint8. Else as `read_into`."""
        octets = torch.empty(num_bytes, dtype=torch.uint8)
        self.read_into([octets.numpy().data], name, offset)
        return octets

    def read_into(self, views: Sequence[memoryview], name: str, offset: int) -> None:
        """Fill some memory, one view after the other, with a run of bytes.

        Args:
            views: Of bytes; they say how many.
            name: What errors call the tensor that begins there.
            offset: Of the first byte in the file.

        Raises:
            CheckpointError: The file has changed since it was opened, or cannot be read.
        """
        try:
            self._fill([view for view in views if view], offset)
            changed = self._stamp() != self._seen
        except OSError as error:
            raise self._unreadable(f"{name} in {self._path}", error) from error
        if changed:
            raise CheckpointError(
                f"{self._path} changed while it was being read",
                why="its size or its time is not what it was when it was opened",
                fix="write a checkpoint to a folder of its own, and name it when it is complete",
            )

    @staticmethod
    def _unreadable(what: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{what} cannot be read", why=str(error), fix="check the disk and the file, try again"
        )

    def _fill(self, views: list[memoryview], start: int) -> None:
        while views:  # one call reads 2 GiB at most
            count = os.preadv(self._file.fileno(), views[:_MOST_VIEWS], start)
            if count == 0:
                raise OSError("the file ends too early")
            start += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns
