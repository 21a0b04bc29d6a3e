# SPDX-License-Identifier: Apache-2.0
"""E2M1, NVFP4's element: a sign, two exponent bits, one mantissa bit, two elements a byte."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["E2M1_MAGNITUDES", "E2M1_MAX", "pack", "round_to_e2m1", "unpack"]

# Codes 0..7; code + 8 is the same magnitude with a minus sign, -0 included.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0

_FP32_EXPONENT = 0x7F800000
_FP32_ONE = 0x3F800000
_ANCHOR = 1.5 * 2.0**22

_PAIR_OF = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}


def round_to_e2m1(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even code.

    Magnitudes above 6 and infinities become 6; a sign survives rounding to zero; NaN becomes +6.

    Two neighbours below 2 are 0.5 apart, below 4 they are 1 apart, below 6 they are 2 apart: half
    the largest power of two that is not above the magnitude, and never less than 0.5. In a sum
    with 1.5 * 2**22 times that power the last place is worth just as much, whatever the sign, so
    adding and subtracting it lets FP32's own rounding, ties to even included, do the work.

    Args:
        values: Any shape, fp32.

    Returns:
        The same shape, fp32: one of the 15 E2M1 values, or -0.

    Source: `cvt.rn.satfinite.e2m1x2.f32` of the PTX ISA; OCP MX v1.0, table 5.
    """
    signed = values.nan_to_num(nan=E2M1_MAX).clamp_(-E2M1_MAX, E2M1_MAX)
    exponent = signed.view(torch.int32) & _exponent_mask(values.device)
    power = exponent.clamp_(min=_FP32_ONE).view(torch.float32)
    return signed.add(power, alpha=_ANCHOR).sub_(power, alpha=_ANCHOR).copysign_(signed)


def pack(values: Tensor) -> Tensor:
    """Write E2M1 values as codes, two a byte.

    Args:
        values: (..., K) fp32, K even, already rounded by `round_to_e2m1`.

    Returns:
        (..., K / 2) uint8; element 2i in the low nibble, 2i + 1 in the high one.
    """
    # Every E2M1 value is an E4M3 value too: two of those bytes together index a table of codes.
    # On a CPU this is three operations where shifting and masking takes ten.
    octets = values.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    pairs = octets.view(torch.uint16).int()
    codes = _codes_of_pairs(values.device).index_select(0, pairs.flatten())
    return codes.view(pairs.shape)


def unpack(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read codes as E2M1 values.

    Args:
        codes: (..., K / 2) uint8, element 2i in the low nibble.
        dtype: bf16, fp16 or fp32; all hold every E2M1 value exactly.

    Returns:
        (..., K) of `dtype`, a new tensor.
    """
    table = _values_of_codes(dtype, codes.device)
    pairs = table.index_select(0, codes.flatten().int())
    return pairs.view(codes.shape).view(dtype)


def _all_pairs(dtype: torch.dtype) -> Tensor:
    """Return the two values of every possible byte: (256, 2)."""
    signed = torch.tensor(
        [sign * magnitude for sign in (1.0, -1.0) for magnitude in E2M1_MAGNITUDES], device="cpu"
    )
    byte = torch.arange(256, device="cpu")
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=-1).to(dtype)


@cache
def _exponent_mask(device: torch.device) -> Tensor:
    """Return the mask as a tensor: an integer would be made one in every `&`, 2 µs on a CPU."""
    return torch.tensor(_FP32_EXPONENT, dtype=torch.int32, device=device)


@cache
def _values_of_codes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return both values of every byte, side by side in one integer: (256,)."""
    return _all_pairs(dtype).view(_PAIR_OF[dtype]).flatten().to(device)


@cache
def _codes_of_pairs(device: torch.device) -> Tensor:
    """Return the byte for two neighbouring E4M3 values, read as one integer: (65536,) uint8."""
    table = torch.zeros(1 << 16, dtype=torch.uint8, device="cpu")
    pairs = _all_pairs(torch.float8_e4m3fn).view(torch.uint16).flatten().int()
    table[pairs] = torch.arange(256, dtype=torch.uint8, device="cpu")
    return table.to(device)
