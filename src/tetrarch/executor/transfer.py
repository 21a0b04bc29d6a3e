# SPDX-License-Identifier: Apache-2.0
"""Between the host and the device, without waiting.

A copy out of memory that the system may move makes the host wait for the device, and so for all
that was launched before. Pinned memory is copied from and to while the host goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tetrarch.core.units import align_up

__all__ = ["Download", "upload"]

_ALIGN = 16  # bytes; the widest load of a kernel


def upload(device: torch.device, *arrays: NDArray[np.generic]) -> tuple[Tensor, ...]:
    """Copy arrays to the device: one transfer for all of them, which nobody waits for.

    Returns:
        Tensors of their dtypes and shapes, in order. On a GPU they share one storage; on a CPU,
        packing them would take longer than the five copies that it saves.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(np.array(array, order="C")) for array in arrays)
    whole = [np.ascontiguousarray(array) for array in arrays]
    starts = list(accumulate((align_up(one.nbytes, _ALIGN) for one in whole), initial=0))
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    flat = host.numpy()
    for array, start in zip(whole, starts, strict=False):
        flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)  # the allocator keeps `host` until it has arrived
    return tuple(
        there[start : start + one.nbytes].view(torch.from_numpy(one).dtype).view(one.shape)
        for one, start in zip(whole, starts, strict=False)
    )


class Download:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies; they are made when all that was launched before is done."""
        self._tensors = [_to_host(tensor) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        """Return the tensors, on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
