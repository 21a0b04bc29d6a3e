# SPDX-License-Identifier: Apache-2.0
"""Open another process's CUDA memory, and learn from the driver how far it reaches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tetrarch.models.unpickle import refused, shown

__all__ = ["CudaMemory", "device_index", "open_cuda"]

_HANDLE_BYTES = 66  # version, kind, and the 64 bytes of a cudaIpcMemHandle
_CUDA_MALLOC = b"c"  # the kind of a plain allocation; "e" is an expandable segment
_EVENT_BYTES = 64
_COUNTERS = 10_000  # reference counts of 8 bytes in one of the sender's counter files
_SHARED = Path("/dev/shm")
_FIX = "keep the sender and its tensors alive until the reply, on a GPU of the server's machine"


@dataclass(frozen=True, eq=False)
class CudaMemory:
    """A storage of another process: uint8 `[bytes]` on our device, mapped."""

    mapped: Tensor

    @property
    def num_bytes(self) -> int:
        """Of the storage."""
        return self.mapped.numel()

    def copied(self, low: int, high: int) -> Tensor:
        """Copy on the device, and wait: the sender may write again once it hears back."""
        copy = self.mapped[low:high].clone()
        torch.cuda.synchronize(copy.device)
        return copy


def device_index(device: object) -> int:
    """Return the index of the sender's device here.

    Args:
        device: An index, or the device's UUID: indices differ where CUDA_VISIBLE_DEVICES differs.

    Raises:
        RequestError: This server sees no such device.
    """
    seen = torch.cuda.device_count()
    if type(device) is int and 0 <= device < seen:
        return device
    for index in range(seen):
        if isinstance(device, str) and str(torch.cuda.get_device_properties(index).uuid) == device:
            return index
    raise refused(
        f"its tensors lie on CUDA device {shown(str(device))}; this server sees {seen}",
        fix="send CPU tensors, or let the server see the trainer's device",
    )


def open_cuda(
    device: int, handle: bytes, extent: tuple[int, int], rest: tuple[object, ...]
) -> CudaMemory:
    """Open a storage by its IPC handle.

    Args:
        device: Index here.
        handle: As torch shares it.
        extent: Length of the storage and its place in the allocation, bytes.
        rest: Counter file, counter, event, whether to wait for the event.

    Raises:
        RequestError: The handle is not one of another living process, or the storage reaches
            beyond the allocation: a kernel that reads there ends this process's CUDA context.
    """
    if len(handle) != _HANDLE_BYTES or handle[1:2] != _CUDA_MALLOC:
        raise refused(
            "a CUDA tensor has an IPC handle that is not one of a plain allocation",
            fix="share with expandable segments off (PYTORCH_CUDA_ALLOC_CONF)",
        )
    counters, counter, event, waits = _checked(rest)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(  # pyright: ignore[reportPrivateUsage]
            device, handle, *extent, counters, counter, event, waits
        )
    except RuntimeError as error:
        raise refused(f"its CUDA memory cannot be opened: {shown(str(error))}", fix=_FIX) from error
    memory = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
    _stay_inside(memory)
    return CudaMemory(memory)


def _checked(rest: tuple[object, ...]) -> tuple[bytes, int, bytes, bool]:
    """Torch adds to the sender's counter without asking; where it points must be checked here."""
    match rest:
        case (bytes(counters), int(counter), bytes(event), bool(waits)):
            pass
        case _:
            raise refused("a CUDA tensor without its counter and event")
    file = _SHARED / counters.decode("ascii", "replace").lstrip("/")
    if not 0 <= counter < _COUNTERS or file.parent != _SHARED or len(event) != _EVENT_BYTES:
        raise refused("a CUDA tensor whose counter or event cannot be")
    try:
        length = file.lstat().st_size
    except (OSError, ValueError) as error:
        raise refused("the sender of a CUDA tensor is gone", fix=_FIX) from error
    if length < 8 * _COUNTERS:
        raise refused("a CUDA tensor whose counter file is too short")
    return counters, counter, event, waits


def _stay_inside(memory: Tensor) -> None:
    base, length = ctypes.c_void_p(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(length), ctypes.c_void_p(memory.data_ptr())
    )
    end = memory.data_ptr() + memory.numel()
    if failed or base.value is None or end > base.value + length.value:
        raise refused(f"a CUDA storage claims {memory.numel()} bytes, more than were shared")
