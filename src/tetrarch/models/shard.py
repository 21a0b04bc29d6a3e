# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: what is in it, and its tensors one by one.

Tensors are read, not mapped. A mapped file that shrinks, or a disk that fails, ends the process
with a signal; a read that comes short is an error like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tetrarch.core.errors import CheckpointError

__all__ = ["Shard"]

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Shard:
    """An open file. What replaces it under its name is not seen; what changes it is noticed.

    Attributes:
        entries: Tensor → its shape and dtype.

    Raises:
        CheckpointError: The file is damaged, or holds a type that torch lacks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with cast(Any, safe_open)(str(path), framework="pt"):
                pass  # it checks the header: sizes, offsets, the file's length
            self._file = path.open("rb", buffering=0)
            length = int.from_bytes(self._file.read(8), "little")
            header: dict[str, Any] = json.loads(self._file.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged",
                why=str(error),
                fix="download the file again; it is truncated or not a safetensors file",
            ) from error
        header.pop("__metadata__", None)
        self._starts = {n: 8 + length + entry["data_offsets"][0] for n, entry in header.items()}
        self.entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(entry["shape"]), _dtype(path, name, entry["dtype"]))
            for name, entry in header.items()
        }
        self._seen = self._stamp()

    def read(self, name: str) -> Tensor:
        """Return a tensor, in memory of its own.

        Raises:
            CheckpointError: The file has changed since it was opened, or cannot be read.
        """
        shape, dtype = self.entries[name]
        octets = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
        try:
            self._fill(octets.numpy().data, self._starts[name])
            changed = self._stamp() != self._seen
        except OSError as error:
            raise CheckpointError(
                f"{name} in {self._path} cannot be read",
                why=str(error),
                fix="check the disk and the file, and try again",
            ) from error
        if changed:
            raise CheckpointError(
                f"{self._path} changed while it was being read",
                why="its size or its time is not what it was when its header was checked",
                fix="write a checkpoint to a folder of its own, and name it when it is complete",
            )
        return octets.view(dtype).view(shape)

    def _fill(self, view: memoryview, start: int) -> None:
        while view:  # one call reads 2 GiB at most
            count = os.preadv(self._file.fileno(), [view], start)
            if count == 0:
                raise OSError("the file ends too early")
            view, start = view[count:], start + count

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def _dtype(path: Path, name: str, word: str) -> torch.dtype:
    if word not in _DTYPES:
        raise CheckpointError(
            f"{name} in {path} is of type {word}",
            why="torch has no such element type",
            fix="convert the checkpoint to BF16, FP8 (E4M3) or NVFP4",
        )
    return _DTYPES[word]
