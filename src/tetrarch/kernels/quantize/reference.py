# SPDX-License-Identifier: Apache-2.0
"""Quantize a batch of rows or weights to NVFP4: the torch definition, `numerics.nvfp4`'s."""

from __future__ import annotations

from torch import Tensor

from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe
from tetrarch.numerics.scales import TOKEN_FACTOR, amax_of

__all__ = ["encode_weights", "quantize_per_tensor", "quantize_per_token"]


def quantize_per_token(
    rows: Tensor, *, factor: float = TOKEN_FACTOR, recipe: Recipe | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row under its own scale. See `nvfp4.encode_per_token`.

    Args:
        rows: (M, K) bf16, fp16 or fp32.
        factor: Token scale over the row's largest magnitude.
        recipe: 4-over-6, or `None`.

    Returns:
        codes: (M, K / 2) uint8.
        block_scale: (M, K / 16) float8_e4m3fn, linear.
        token_scale: (M,) fp32.
    """
    return nvfp4.encode_per_token(rows, factor=factor, recipe=recipe)


def quantize_per_tensor(
    rows: Tensor, *, input_scale: Tensor, recipe: Recipe | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize all rows under one static scale. See `nvfp4.encode`.

    Args:
        rows: (M, K) bf16, fp16 or fp32.
        input_scale: () fp32, decode scale, as a checkpoint calibrated it.
        recipe: 4-over-6, or `None`.

    Returns:
        codes: (M, K / 2) uint8.
        block_scale: (M, K / 16) float8_e4m3fn, linear.
    """
    return nvfp4.encode(rows, encode_scale=input_scale.reciprocal(), recipe=recipe)


def encode_weights(
    x: Tensor,
    *,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    amax: Tensor,
    recipe: Recipe | None = WEIGHT_RECIPE,
) -> None:
    """Encode a stack of weights, each under a scale of its own. See `nvfp4.encode_weight`.

    Args:
        x: (E, N, K) bf16, fp16 or fp32. An expert's gate and up, which share a scale, are one
            matrix of 2I rows here.
        codes: (E, N, K / 2) uint8, overwritten.
        block_scale: (E, N, K / 16) float8_e4m3fn, overwritten.
        global_scale: (E,) fp32, overwritten; decode scales, 1 for a weight of zeros.
        amax: (E,) fp32, overwritten with the largest magnitudes.
        recipe: 4-over-6, or `None`.
    """
    for at, weight in enumerate(x):
        amax[at] = amax_of(weight)
        encoded = nvfp4.encode_weight(weight, recipe, amax[at])
        codes[at], block_scale[at], global_scale[at] = encoded
