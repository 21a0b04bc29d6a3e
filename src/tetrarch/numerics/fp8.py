# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3: rounding to it, and decoding checkpoints whose weights are stored in it."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrarch.core.errors import ShapeError
from tetrarch.core.units import ceil_div

__all__ = ["E4M3_MAX", "decode_block", "decode_tensor", "round_to_e4m3"]

E4M3_MAX = 448.0

# What a scale may be stored as: FP32, BF16 (older exports), or a bare exponent (UE8M0).
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def round_to_e4m3(values: Tensor) -> Tensor:
    """Round to the nearest E4M3 value, ties to even, saturating.

    Magnitudes above 448 and infinities become 448; NaN stays NaN (byte 0x7F); a magnitude of
    2**-10 or less becomes zero, the smallest subnormal being 2**-9.

    Args:
        values: Any shape, fp32.

    Returns:
        The same shape, float8_e4m3fn.

    Source: `cvt.rn.satfinite.e4m3x2.f32` of the PTX ISA. The clamp is ours: before torch 2.13 the
    cast turned values above 464 into NaN.
    """
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_block(
    weight: Tensor,
    scale_inv: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Decode a weight with one scale per rectangular block, as DeepSeek stores it.

    Each element is the FP32 product of element and scale, rounded once to `dtype`. The name
    `scale_inv` is the checkpoints'; it multiplies.

    Args:
        weight: (N, K) float8_e4m3fn.
        scale_inv: (ceil(N / block[0]), ceil(K / block[1])) fp32, bf16 or float8_e8m0fnu.
        block: Rows and columns that share one scale.
        dtype: What to return.

    Returns:
        (N, K) of `dtype`.

    Raises:
        ShapeError: A shape or a dtype is not the above.

    Source: SGLang 0.5.23 `block_quant_dequant`, bytes checked against golden/sglang_scales_fp8.
    """
    _check_weight(weight)
    rows, columns = block
    want = (ceil_div(weight.shape[0], rows), ceil_div(weight.shape[1], columns))
    _check_scale(scale_inv, tuple(scale_inv.shape) == want, f"shape {want}, one per {block} block")
    decoded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    # One band of rows at a time: temporaries stay at 8 bytes an element of the band.
    for band, scale in enumerate(scale_inv.float()):
        part = slice(band * rows, (band + 1) * rows)
        per_column = scale.repeat_interleave(columns)[: weight.shape[1]]
        decoded[part] = weight[part].float().mul_(per_column)
    return decoded


def decode_tensor(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode a weight with one scale, as ModelOpt stores FP8.

    Each element is the FP32 product of element and scale, rounded once to `dtype`. SGLang
    multiplies in FP16 where the scale has no dimension, and so loses up to 1.7 % of small weights
    to FP16's subnormals; we do not follow it there.

    Args:
        weight: (N, K) float8_e4m3fn.
        scale: () or (1,) fp32 or bf16.
        dtype: What to return.

    Returns:
        (N, K) of `dtype`.

    Raises:
        ShapeError: A shape or a dtype is not the above.

    Source: golden/sglang_scales_fp8, `fp8_tensor_1dim`.
    """
    _check_weight(weight)
    _check_scale(scale, scale.numel() == 1, "one element")
    return (weight.float() * scale.float()).to(dtype)


def _check_weight(weight: Tensor) -> None:
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ShapeError(
            f"an FP8 weight is {weight.dtype} of shape {tuple(weight.shape)}",
            why="FP8 sources are decoded from matrices of float8_e4m3fn",
            fix="pass the checkpoint's `weight` tensor, one matrix at a time",
        )


def _check_scale(scale: Tensor, fits: bool, want: str) -> None:  # noqa: FBT001
    if not fits or scale.dtype not in _SCALE_DTYPES:
        raise ShapeError(
            f"an FP8 weight's scale is {scale.dtype} of shape {tuple(scale.shape)}",
            why=f"this weight needs {want}, in fp32, bf16 or float8_e8m0fnu",
            fix="pass the scale that belongs to this weight, unpacked",
        )
