# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint may hand us as a matrix or a bias of an expert."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrarch.moe.types import Nvfp4Matrix

__all__ = ["bias_flaw", "matrix_flaw", "scale_flaw"]

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = torch.float8_e4m3fn
_LARGEST_E4M3 = 0x7E  # the byte of 448; 0x7F is NaN, 0x80 and above are negative


def matrix_flaw(value: Tensor | Nvfp4Matrix, shape: tuple[int, int]) -> str | None:
    """Say why `value` cannot be an (N, K) weight of `shape`, or return `None`."""
    if not isinstance(value, Nvfp4Matrix):
        return _plain_flaw(value, shape)
    rows, width = shape
    for what, have, want, dtype in (
        ("codes", value.codes, (rows, width // 2), torch.uint8),
        ("block scales (groups of 16)", value.block_scale, (rows, width // 16), _E4M3),
    ):
        if tuple(have.shape) != want or have.dtype != dtype:
            return f"its {what} are {tuple(have.shape)} {have.dtype}, expected {want} {dtype}"
    if int(value.block_scale.view(torch.uint8).amax()) > _LARGEST_E4M3:
        return "its block scales hold NaN or negative values"
    return scale_flaw("global", value.global_scale)


def scale_flaw(which: str, scale: Tensor) -> str | None:
    """Say why `scale` cannot be a decode scale of one matrix, or return `None`."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        return f"its {which} scale is {tuple(scale.shape)} {scale.dtype}, expected one float32"
    if not 0.0 < float(scale) < math.inf:
        return f"its {which} scale is {float(scale)}, expected a positive finite number"
    return None


def bias_flaw(value: Tensor, width: int) -> str | None:
    """Say why `value` cannot be a bias of `width` outputs, or return `None`."""
    return _plain_flaw(value, (width,))


def _plain_flaw(value: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(value.shape) != shape or value.dtype not in _PLAIN:
        return f"it is {tuple(value.shape)} {value.dtype}, expected {shape} bf16, fp16 or fp32"
    low, high = value.aminmax()
    finite = math.isfinite(float(low)) and math.isfinite(float(high))
    return None if finite else "it holds NaN or infinite values"
