# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint may hand us as a matrix or a bias of an expert.

Shapes and types are looked at when a tensor comes. Its values are looked at by the device, in
passing: asking for the result at once would let a GPU run dry 50,000 times a load.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrarch.moe.types import Nvfp4Matrix

__all__ = ["Values", "bias_flaw", "matrix_flaw", "scale_flaw"]

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = torch.float8_e4m3fn
_LARGEST_E4M3 = 0x7E  # the byte of 448; 0x7F is NaN, 0x80 and above are negative


def matrix_flaw(value: Tensor | Nvfp4Matrix, shape: tuple[int, int]) -> str | None:
    """Say why `value`, whatever it holds, cannot be an (N, K) weight, or return `None`."""
    if not isinstance(value, Nvfp4Matrix):
        return _plain_flaw(value, shape)
    rows, width = shape
    for what, have, want, dtype in (
        ("codes", value.codes, (rows, width // 2), torch.uint8),
        ("block scales (groups of 16)", value.block_scale, (rows, width // 16), _E4M3),
    ):
        if tuple(have.shape) != want or have.dtype != dtype:
            return f"its {what} are {tuple(have.shape)} {have.dtype}, expected {want} {dtype}"
    return scale_flaw("global", value.global_scale)


def scale_flaw(which: str, scale: Tensor) -> str | None:
    """Say why `scale` cannot be a decode scale of one matrix, or return `None`."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        return f"its {which} scale is {tuple(scale.shape)} {scale.dtype}, expected one float32"
    if not 0.0 < float(scale) < math.inf:
        return f"its {which} scale is {float(scale)}, expected a positive finite number"
    return None


def bias_flaw(value: Tensor, width: int) -> str | None:
    """Say why `value`, whatever it holds, cannot be a bias of `width` outputs."""
    return _plain_flaw(value, (width,))


def _plain_flaw(value: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(value.shape) != shape or value.dtype not in _PLAIN:
        return f"it is {tuple(value.shape)} {value.dtype}, expected {shape} bf16, fp16 or fp32"
    return None


class Values:
    """The least and the largest number of each tensor that came, known to the device alone."""

    def __init__(self) -> None:
        self._ends: dict[torch.dtype, list[tuple[str, Tensor, Tensor]]] = {}

    def note(self, name: str, value: Tensor | Nvfp4Matrix) -> None:
        """Look at a tensor, or at the block scales of a serialized one; nobody waits."""
        if isinstance(value, Nvfp4Matrix):
            value = value.block_scale.view(torch.uint8)
        low, high = value.aminmax()
        self._ends.setdefault(value.dtype, []).append((name, low, high))

    def flaw(self) -> tuple[str, str] | None:
        """Return the first name since the last call whose values no weight has, and why."""
        for dtype, noted in self._ends.items():
            ends = torch.stack([end for _, *ends in noted for end in ends]).float().tolist()
            for (name, *_), low, high in zip(noted, ends[::2], ends[1::2], strict=True):
                if not (math.isfinite(low) and math.isfinite(high)):
                    return name, "it holds NaN or infinite values"
                if dtype is torch.uint8 and high > _LARGEST_E4M3:
                    return name, "its block scales hold NaN or negative values"
        self._ends = {}
        return None
