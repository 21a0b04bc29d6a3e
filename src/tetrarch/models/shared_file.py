# SPDX-License-Identifier: Apache-2.0
"""Storages of torch's `file_system` sharing strategy, read as files.

torch would map such a file and connect to the sender's `torch_shm_manager` by the path that the
pickle names. A mapping that the sender cuts short is a SIGBUS, a path that a client chose can be
any socket of this machine, and the connection, held for ever, keeps the manager from removing what
a dead sender leaves in /dev/shm. Reading the file needs none of it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.models.unpickle import refused, shown

__all__ = ["SharedFile", "open_shared"]

_SHARED = Path("/dev/shm")
_NAME = re.compile(rb"/torch_[0-9_]{1,60}")
# torch keeps a 32-bit reference count in front of the data; who brings it to 0 removes the file.
_HEADER, _COUNT = 64, struct.Struct("i")


@dataclass(eq=False)
class SharedFile:
    """One storage in shared memory.

    Attributes:
        path: Of its file.
        num_bytes: Of the storage.
        mentions: How often the payload names it; the sender counted a reference for each.
    """

    path: Path
    num_bytes: int
    mentions: int = 1

    def copied(self, low: int, high: int) -> Tensor:
        """Read the bytes, and give the sender's references back.

        Raises:
            RequestError: The file is gone or shorter than it was.
        """
        copy = torch.empty(high - low, dtype=torch.uint8)
        rest = copy.numpy().data
        try:
            with self.path.open("rb+", buffering=0) as file:
                file.seek(_HEADER + low)
                while rest and (length := file.readinto(rest)):
                    rest = rest[length:]
                self._give_back(file.fileno())
        except (OSError, struct.error) as error:
            raise _gone(self.path, error) from error
        if rest:
            raise _gone(self.path, EOFError(f"{len(rest)} bytes are missing"))
        return copy

    def _give_back(self, file: int) -> None:
        """Without it the file would outlive the sender's tensor.

        The lock is for other receivers; torch's own changes are single instructions.
        """
        fcntl.flock(file, fcntl.LOCK_EX)
        (references,) = _COUNT.unpack(os.pread(file, _COUNT.size, 0))
        left = max(references - self.mentions, 0)
        os.pwrite(file, _COUNT.pack(left), 0)
        if left == 0:
            self.path.unlink(missing_ok=True)


def open_shared(handle: bytes, num_bytes: int) -> SharedFile:
    """Find a storage by its name.

    Args:
        handle: Name of the shared memory.
        num_bytes: Length that the sender claims.

    Raises:
        RequestError: The name is none that torch gives, there is no such shared memory, or it is
            shorter than claimed.
    """
    if not _NAME.fullmatch(handle):
        raise refused(f"{shown(repr(handle))} is no name of shared memory that torch gives")
    path = _SHARED / handle[1:].decode()
    try:
        found = path.lstat()
    except OSError as error:
        raise _gone(path, error) from error
    held = found.st_size - _HEADER
    if not stat.S_ISREG(found.st_mode) or held < num_bytes:
        raise refused(f"a storage claims {num_bytes} bytes; its shared memory holds {held}")
    return SharedFile(path, num_bytes)


def _gone(path: Path, error: Exception) -> RequestError:
    return refused(
        f"the shared memory {path.name} cannot be read ({error})",
        fix="keep the sender and its tensors alive until the reply, on the server's machine",
    )
