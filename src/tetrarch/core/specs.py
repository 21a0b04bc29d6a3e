# SPDX-License-Identifier: Apache-2.0
"""The shape, type and place of a tensor, before the tensor exists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a buffer must be. Declared by whoever needs it, allocated by the slot table."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Allocate, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def mismatch(self, value: Tensor) -> str | None:
        """Say in words how `value` differs, or return `None`.

        A device without an index is any of its kind: `cuda` allocates on `cuda:0`.
        """
        device = value.device
        if self.device == torch.device(device.type):
            device = self.device
        for what, want, got in (
            ("shape", self.shape, tuple(value.shape)),
            ("dtype", self.dtype, value.dtype),
            ("device", self.device, device),
        ):
            if want != got:
                return f"{what} is {got}, expected {want}"
        return None
