# SPDX-License-Identifier: Apache-2.0
"""Sixteen neighbours and the scale they share: the rounding at the heart of NVFP4.

What these functions return is rounded but still FP32: `numbers` are E2M1 values and `scales` are
E4M3 values. `nvfp4` either writes them as bytes or multiplies them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tetrarch.core.errors import ConfigError, ShapeError
from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.e2m1 import E2M1_MAX, round_to_e2m1
from tetrarch.numerics.four_over_six import element_scale, round_4over6
from tetrarch.numerics.fp8 import round_to_e4m3
from tetrarch.numerics.scales import constant, token_scales

__all__ = [
    "BLOCK",
    "check_encoded",
    "check_recipe",
    "check_values",
    "quantize",
    "quantize_per_row",
    "scaled",
]

BLOCK = 16  # elements along K that share a block scale

_SOURCES = (torch.bfloat16, torch.float16, torch.float32)

# fl(1/6): the kernels multiply the encode scale by it before they look at a block.
_ONE_SIXTH = float(torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32))


def quantize(
    rows: Tensor, encode_scale: Tensor, *, recipe: Recipe | None, row_amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round rows under a given encode scale.

    Args:
        rows: (R, K) bf16, fp16 or fp32.
        encode_scale: () or (R, 1) fp32.
        recipe: 4-over-6, or `None`.
        row_amax: (R, 1) fp32, for the strict error of a recipe with one encode scale per row.

    Returns:
        numbers: (R, K / 16, 16) fp32.
        scales: (R, K / 16, 1) fp32.
    """
    blocks, amax = _blocks(rows)
    encode_scale = encode_scale.unsqueeze(-1)
    return _round(
        blocks,
        amax,
        scale=(encode_scale, encode_scale.reciprocal()),
        recipe=recipe,
        row_amax=None if row_amax is None else row_amax.unsqueeze(-1),
    )


def quantize_per_row(
    rows: Tensor, factor: float, *, recipe: Recipe | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows, each under its own scale.

    Args:
        rows: (R, K) bf16, fp16 or fp32.
        factor: Token scale over the row's largest magnitude.
        recipe: 4-over-6, or `None`.

    Returns:
        numbers: (R, K / 16, 16) fp32.
        scales: (R, K / 16, 1) fp32.
        token_scale: (R, 1) fp32.
    """
    blocks, amax = _blocks(rows)
    row_amax = amax.amax(1, keepdim=True)
    scale = token_scales(row_amax, factor)
    numbers, scales = _round(blocks, amax, scale=scale, recipe=recipe, row_amax=row_amax)
    return numbers, scales, scale[1].squeeze(-1)


def scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """Multiply (R, K) in place by (R, K / 16), one scale for each 16 elements."""
    numbers.view(*scales.shape, BLOCK).mul_(scales.unsqueeze(-1))
    return numbers


def _blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (R, B, 16) fp32 and each block's largest magnitude: (R, B, 1), -1 if all are NaN."""
    blocks = rows.float().view(rows.shape[0], rows.shape[1] // BLOCK, BLOCK)
    return blocks, blocks.abs().nan_to_num_(nan=-1.0, posinf=math.inf).amax(-1, keepdim=True)


def _round(
    blocks: Tensor,
    amax: Tensor,
    *,
    scale: tuple[Tensor, Tensor],
    recipe: Recipe | None,
    row_amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return numbers and scales; `scale` is encode and decode scale, both of three dimensions."""
    amax = torch.threshold_(amax, -0.5, math.nan)
    if recipe is not None:
        return round_4over6(blocks, amax, scale=scale, recipe=recipe, row_amax=row_amax)
    # A block of zeros needs no case of its own: its scale is 0, and multiplying zeros by anything
    # finite leaves them and their signs alone.
    encode_scale, decode_scale = scale
    sixth = encode_scale * constant(_ONE_SIXTH, encode_scale.device)
    scales = round_to_e4m3(amax * sixth).float()
    return round_to_e2m1(blocks * element_scale(scales, decode_scale)), scales


def check_values(values: Tensor) -> None:
    """Refuse what has no 16 neighbours, or is of a dtype that FP32 does not hold.

    Raises:
        ShapeError: The last axis is not a positive multiple of 16, or the dtype is another one
            than bf16, fp16 and fp32.
    """
    if values.dim() == 0 or values.shape[-1] == 0 or values.shape[-1] % BLOCK:
        raise ShapeError(
            f"values of shape {tuple(values.shape)} cannot be NVFP4",
            why=f"{BLOCK} neighbours along the last axis share a scale",
            fix=f"pad the last axis to a multiple of {BLOCK}, or leave this weight unquantized",
        )
    if values.dtype not in _SOURCES:
        raise ShapeError(
            f"values of {values.dtype} cannot be encoded as NVFP4",
            why="the rounding starts from bf16, fp16 or fp32",
            fix="decode FP8 sources with numerics.fp8 first",
        )


def check_encoded(codes: Tensor, block_scale: Tensor) -> None:
    """Refuse codes and block scales that do not belong together.

    Raises:
        ShapeError: A dtype is not uint8 and float8_e4m3fn, or there is not one scale per 8 bytes.
    """
    typed = codes.dtype == torch.uint8 and block_scale.dtype == torch.float8_e4m3fn
    blocks = (*block_scale.shape[:-1], block_scale.shape[-1] * (BLOCK // 2))
    if not typed or codes.shape[-1] == 0 or tuple(codes.shape) != blocks:
        raise ShapeError(
            f"{codes.dtype} codes of shape {tuple(codes.shape)} with {block_scale.dtype} block "
            f"scales of shape {tuple(block_scale.shape)} are not NVFP4",
            why=f"uint8 codes come two a byte with one float8_e4m3fn scale per {BLOCK} elements",
            fix="pass both tensors of one weight, block scales in linear layout",
        )


def check_recipe(recipe: Recipe | None, factor: float | None = None) -> None:
    """Refuse a 4-over-6 recipe that nobody defines, or that would measure a wrong error.

    Raises:
        ConfigError: `e4m3_max` is not 448 or 256, `error` is not mae or mse, or the token factor
            is not the one that the strict error assumes.
    """
    if recipe is None:
        return
    if recipe.e4m3_max not in (448, 256) or recipe.error not in ("mae", "mse"):
        raise ConfigError(
            f"4-over-6 recipe {recipe}",
            why="only a maximum of 448 or 256 and the errors mae and mse are defined",
            fix="choose from those",
        )
    if factor is not None and not math.isclose(factor, recipe.token_factor, rel_tol=1e-6):
        raise ConfigError(
            f"4-over-6 of {recipe.e4m3_max} with a token factor of {factor:.6g}",
            why="its error is measured as if the factor were 1 / (6 * e4m3_max)",
            fix=f"use 1/{6 * recipe.e4m3_max}, or no 4-over-6 for these activations",
        )
