# SPDX-License-Identifier: Apache-2.0
"""Round rows to NVFP4 in Triton: bit for bit what `numerics.nvfp4` says.

One program holds whole rows, so that a row is read once: largest magnitude, scales and codes come
from registers. What is rounded to E4M3 and E2M1 is rounded by FP32 additions (`round_to_e4m3`,
`round_to_e2m1`), which every GPU has, so that sm_80 needs no code of its own.

Products and sums must be rounded one by one, as the reference does: kernels are launched without
floating-point fusion, divisions are `div_rn`, and the few fused operations here are exact.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.core.units import ceil_div
from tetrarch.numerics.blocks import BLOCK, check_recipe
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe
from tetrarch.numerics.scales import TOKEN_FACTOR

__all__ = [
    "encode_rows",
    "encode_rows_per_token",
    "encode_weights",
    "quantize_tile",
    "round_rows",
    "store_tile",
]


@triton.jit
def round_to_e4m3(values):
    """Round magnitudes to E4M3, ties to even, saturating; NaN stays. See `round_to_e2m1`.

    Neighbours are 1/8 of the power of two below them apart, and never less than 2**-9.
    """
    capped = tl.minimum(values, 448.0)
    exponent = capped.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent, 0x3C800000).to(tl.float32, bitcast=True)  # at least 2**-6
    rounded = tl.fma(power, -1572864.0, tl.fma(power, 1572864.0, capped))  # 1.5 * 2**20
    return tl.where(values == values, rounded, values)  # NaN alone is not itself


@triton.jit
def round_to_e2m1(values):
    """Round to E2M1, ties to even, saturating; NaN becomes +6. `numerics.e2m1` says why it works.

    Both fused operations are exact up to the rounding that is meant.
    """
    capped = tl.maximum(tl.minimum(values, 6.0), -6.0)  # a minimum with NaN is the other operand
    bits = capped.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)
    rounded = tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, capped))  # 1.5 * 2**22
    signed = rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF | bits & -0x80000000
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def _element_scale(block_scale, decode_scale):
    """Return `min(1 / (block_scale * decode_scale), FP32's largest)`; NaN stays."""
    inverse = tl.div_rn(1.0, block_scale * decode_scale)
    return tl.minimum(inverse, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _in_order(terms):
    """Sum (R, B, 16) to (R, B) from left to right, one rounding an addition."""
    rows: tl.constexpr = terms.shape[0]
    blocks: tl.constexpr = terms.shape[1]
    even, odd = tl.split(tl.reshape(terms, (rows, blocks, 2, 2, 2, 2)))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)  # tN: (R, B, 2, 2), terms N, N + 4, N + 8, N + 12
    low0, low4 = tl.split(t0)
    low1, low5 = tl.split(t1)
    low2, low6 = tl.split(t2)
    low3, low7 = tl.split(t3)
    a0, a8 = tl.split(low0)
    a1, a9 = tl.split(low1)
    a2, a10 = tl.split(low2)
    a3, a11 = tl.split(low3)
    a4, a12 = tl.split(low4)
    a5, a13 = tl.split(low5)
    a6, a14 = tl.split(low6)
    a7, a15 = tl.split(low7)
    total = ((((((a0 + a1) + a2) + a3) + a4) + a5) + a6) + a7
    return (((((((total + a8) + a9) + a10) + a11) + a12) + a13) + a14) + a15


@triton.jit
def _candidate(values, scales, decode_scale, encode_scale, row_amax, RECIPE: tl.constexpr):
    """Return the numbers under a candidate scale and their error: (R, B, 16) and (R, B)."""
    numbers = round_to_e2m1(values * _element_scale(scales, decode_scale)[:, :, None])
    decoded = numbers * scales[:, :, None]
    if RECIPE[2]:  # the error is measured on scaled values
        error = decoded - values * encode_scale[:, :, None]
    elif row_amax is None:
        error = decoded * decode_scale[:, :, None] - values
    else:
        error = tl.div_rn(decoded * row_amax[:, None, None], RECIPE[0]) - values
    return numbers, _in_order(tl.abs(error) if RECIPE[1] else error * error)


@triton.jit
def _round_4over6(values, amax, encode_scale, decode_scale, row_amax, RECIPE: tl.constexpr):
    """Round (R, B, 16) under the better of two scales, a tie keeps 6: `numerics.four_over_six`."""
    base = tl.div_rn(amax, 6.0) * encode_scale
    scales6, scales4 = round_to_e4m3(base), round_to_e4m3(base * 1.5)
    six, error6 = _candidate(values, scales6, decode_scale, encode_scale, row_amax, RECIPE)
    four, error4 = _candidate(values, scales4, decode_scale, encode_scale, row_amax, RECIPE)
    takes_four = error4 < error6
    numbers = tl.where(takes_four[:, :, None], four, six)
    numbers = tl.where((amax == 0.0)[:, :, None], tl.abs(numbers), numbers)  # all zeros lose -0
    return numbers, tl.where(takes_four, scales4, scales6)


@triton.jit
def quantize_tile(values, encode_scale, top, RECIPE: tl.constexpr):
    """Round a tile of whole rows.

    Args:
        values: (R, B, 16) fp32; what lies beyond a row's end is NaN, which counts for nothing.
        encode_scale: (R,) fp32, or `None` to give each row its own.
        top: `1 / factor`, read where rows get their own.
        RECIPE: `None`, or (6 * e4m3_max, whether the error is mae, whether it is half_error).

    Returns:
        numbers: (R, B, 16) fp32, E2M1 values.
        scales: (R, B) fp32, E4M3 values.
        token_scale: (R,) fp32; the reciprocal of a given encode scale.
    """
    amax = tl.max(tl.abs(values), axis=2)  # NaN where all 16 are
    if encode_scale is None:
        row_amax = tl.max(amax, axis=1)
        given = tl.div_rn(top, row_amax)
        encode = tl.minimum(tl.where(given > 0.0, given, 1.0), 3.4028234663852886e38)
    else:
        row_amax = None
        encode = encode_scale
    decode = tl.div_rn(1.0, encode)
    if RECIPE is None:
        scales = round_to_e4m3(amax * (encode * 0.16666667163372040)[:, None])  # fl(1/6)
        numbers = round_to_e2m1(values * _element_scale(scales, decode[:, None])[:, :, None])
    else:
        numbers, scales = _round_4over6(
            values, amax, encode[:, None], decode[:, None], row_amax, RECIPE
        )
    if encode_scale is None:
        decode = tl.where(row_amax == 0.0, 0.0, decode)
    return numbers, scales, decode


@triton.jit
def _e2m1_codes(numbers):
    """Return the 4-bit codes of E2M1 values: times 2**-126 their exponents and FP32's agree."""
    bits = (numbers * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    return (bits >> 22) & 7 | (bits >> 28) & 8


@triton.jit
def _e4m3_bytes(scales):
    """Return the bytes of E4M3 magnitudes: times 2**-120 their exponents and FP32's agree."""
    bits = (scales * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    return tl.where(scales == scales, bits >> 20, 0x7F).to(tl.uint8)


@triton.jit
def store_tile(numbers, scales, inside, values, codes, block_scale, BLOCKS: tl.constexpr):
    """Write a tile as products or, where `values` is `None`, as packed codes and scales.

    Args:
        numbers: (R, B, 16) fp32.
        scales: (R, B) fp32.
        inside: (R, B), whether the row has such a block.
        values: Where the first row's products go.
        codes: Where its codes go.
        block_scale: Where its scales go, as bytes.
        BLOCKS: Blocks of a row.
    """
    rows: tl.constexpr = numbers.shape[0]
    tile: tl.constexpr = numbers.shape[1]
    at = tl.arange(0, rows)[:, None] * BLOCKS + tl.arange(0, tile)[None, :]
    if values is not None:
        element = (at * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
        products = (numbers * scales[:, :, None]).to(values.dtype.element_ty)
        tl.store(values + element, products, mask=inside[:, :, None])
    else:
        low, high = tl.split(tl.reshape(_e2m1_codes(numbers), (rows, tile, 8, 2)))
        pair = (at * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
        tl.store(codes + pair, (low | high << 4).to(tl.uint8), mask=inside[:, :, None])
        tl.store(block_scale + at, _e4m3_bytes(scales), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "rows_per_scale"])
def _quantize_rows(
    x,
    values,
    codes,
    block_scale,
    token_scale,
    encode_scale,
    amax,
    num_rows,
    rows_per_scale,
    top,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Quantize `ROWS` rows of `BLOCKS` blocks in each program.

    Encode scales are read, or follow from the largest magnitudes of weights, or are the rows' own.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    block = tl.arange(0, TILE)
    inside = (row < num_rows)[:, None] & (block < BLOCKS)[None, :]
    at = tl.arange(0, ROWS)[:, None] * BLOCKS + block[None, :]
    element = (at * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    start = x + first * (BLOCKS * 16)
    tile = tl.load(start + element, mask=inside[:, :, None], other=float("nan")).to(tl.float32)
    if encode_scale is not None:
        encode = tl.load(encode_scale + row // rows_per_scale, mask=row < num_rows, other=1.0)
    elif amax is not None:
        largest = tl.load(amax + row // rows_per_scale, mask=row < num_rows, other=0.0)
        global_scale = tl.where(largest > 0.0, tl.div_rn(largest, top), 1.0)
        encode = tl.div_rn(1.0, global_scale)
    else:
        encode = None
    numbers, scales, decode = quantize_tile(tile, encode, top, RECIPE)
    if values is not None:
        values += first * (BLOCKS * 16)
    else:
        codes += first * (BLOCKS * 8)
        block_scale += first * BLOCKS
    store_tile(numbers, scales, inside, values, codes, block_scale, BLOCKS)
    if amax is not None:
        first_of = (row % rows_per_scale == 0) & (row < num_rows)
        tl.store(token_scale + row // rows_per_scale, global_scale, mask=first_of)
    elif token_scale is not None:
        tl.store(token_scale + row, decode, mask=row < num_rows)


@triton.jit(do_not_specialize=["size"])
def _amax_of(x, amax, size, LARGEST: tl.constexpr, TILE: tl.constexpr):
    """Raise `amax[e]` to the largest magnitude of `TILE` elements of matrix e."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    start = x + tl.program_id(1).to(tl.int64) * size
    magnitude = tl.abs(tl.load(start + at, mask=at < size, other=0.0).to(tl.float32))
    largest = tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), axis=0)
    tl.atomic_max(amax + tl.program_id(1), tl.minimum(largest, LARGEST), sem="relaxed")


def round_rows(
    x: Tensor,
    *,
    values: Tensor,
    token_scale: Tensor | None = None,
    encode_scale: Tensor | None = None,
    factor: float = TOKEN_FACTOR,
    recipe: Recipe | None = None,
) -> None:
    """Round rows to NVFP4 and keep the exact products code * block_scale.

    Args:
        x: (M, K) bf16, fp16 or fp32, contiguous; K a multiple of 16.
        values: (M, K) bf16, fp16 or fp32 (each holds every product), overwritten.
        token_scale: (M,) fp32, overwritten with each row's decode scale.
        encode_scale: () fp32; given instead of `token_scale`, all rows share it.
        factor: Token scale over a row's largest magnitude.
        recipe: 4-over-6, or `None`.

    Raises:
        ConfigError: There is no such recipe, or not with this factor.

    Source: `nvfp4.fake_quant_per_token` and `nvfp4.fake_quant`, bit for bit.
    """
    check_recipe(recipe, None if token_scale is None else factor)
    outputs = (values, None, None, token_scale)
    _launch(x, outputs, encode_scale=encode_scale, top=reciprocal(factor), recipe=recipe)


def encode_rows_per_token(
    x: Tensor,
    *,
    codes: Tensor,
    block_scale: Tensor,
    token_scale: Tensor,
    factor: float = TOKEN_FACTOR,
    recipe: Recipe | None = None,
) -> None:
    """Encode rows, each under its own scale: `nvfp4.encode_per_token`, bit for bit.

    Args:
        x: (M, K) bf16, fp16 or fp32, contiguous; K a multiple of 16.
        codes: (M, K / 2) uint8, overwritten.
        block_scale: (M, K / 16) float8_e4m3fn, overwritten.
        token_scale: (M,) fp32, overwritten.
        factor: Token scale over a row's largest magnitude.
        recipe: 4-over-6, or `None`.

    Raises:
        ConfigError: There is no such recipe, or not with this factor.
    """
    check_recipe(recipe, factor)
    outputs = (None, codes, block_scale, token_scale)
    _launch(x, outputs, encode_scale=None, top=reciprocal(factor), recipe=recipe)


def encode_rows(
    x: Tensor,
    *,
    codes: Tensor,
    block_scale: Tensor,
    encode_scale: Tensor,
    recipe: Recipe | None = None,
) -> None:
    """Encode rows under given scales: `nvfp4.encode`, bit for bit.

    Args:
        x: (..., K) bf16, fp16 or fp32, contiguous; K a multiple of 16.
        codes: (..., K / 2) uint8, overwritten.
        block_scale: (..., K / 16) float8_e4m3fn, overwritten.
        encode_scale: () fp32, or one for each index of the first axes: (E,) for (E, N, K).
        recipe: 4-over-6, or `None`.

    Raises:
        ConfigError: There is no such recipe.
    """
    check_recipe(recipe)
    _launch(x, (None, codes, block_scale, None), encode_scale=encode_scale, top=1.0, recipe=recipe)


def encode_weights(
    x: Tensor,
    *,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    amax: Tensor,
    recipe: Recipe | None = WEIGHT_RECIPE,
) -> None:
    """Encode a stack of weights, each under a scale of its own: `nvfp4.encode_weight` of each.

    Args:
        x: (E, N, K) bf16, fp16 or fp32, contiguous; N * K below 2**31. An expert's gate and up,
            which share a scale, are one matrix of 2I rows here.
        codes: (E, N, K / 2) uint8, overwritten.
        block_scale: (E, N, K / 16) float8_e4m3fn, overwritten.
        global_scale: (E,) fp32, overwritten; decode scales, 1 for a weight of zeros.
        amax: (E,) fp32, overwritten with the largest magnitudes.
        recipe: 4-over-6, or `None`.

    Raises:
        ConfigError: There is no such recipe.
    """
    check_recipe(recipe)
    amax.zero_()
    matrices, size, tile = x.shape[0], x[0].numel(), 8192
    _amax_of[ceil_div(size, tile), matrices](
        x, amax, size, LARGEST=torch.finfo(x.dtype).max, TILE=tile, num_warps=8
    )
    top = 6.0 * (recipe.e4m3_max if recipe else 448)
    outputs = (None, codes, block_scale, global_scale)
    _launch(x, outputs, encode_scale=None, amax=amax, top=top, recipe=recipe)


def _launch(
    x: Tensor,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    *,
    encode_scale: Tensor | None,
    top: float,
    recipe: Recipe | None,
    amax: Tensor | None = None,
) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    values, codes, block_scale, token_scale = outputs
    shared = encode_scale if amax is None else amax
    rows, warps = tile_shape(num_rows, width)
    _quantize_rows[(ceil_div(num_rows, rows),)](
        x,
        values,
        codes,
        None if block_scale is None else block_scale.view(torch.uint8),
        token_scale,
        encode_scale,
        amax,
        num_rows,
        1 if shared is None else num_rows // shared.numel(),
        top,
        BLOCKS=width // BLOCK,
        TILE=triton.next_power_of_2(width // BLOCK),
        ROWS=rows,
        RECIPE=recipe_constants(recipe),
        num_warps=warps,
        enable_fp_fusion=False,
    )


def tile_shape(num_rows: int, width: int) -> tuple[int, int]:
    """Return how many rows a program takes, and how many warps."""
    padded = triton.next_power_of_2(width)
    rows = 1 if num_rows <= 1024 else max(1, 2048 // padded)
    return rows, min(16, max(1, rows * padded // 512))


def recipe_constants(recipe: Recipe | None) -> tuple[float, bool, bool] | None:
    """Return a recipe as kernels take it."""
    if recipe is None:
        return None
    return 6.0 * recipe.e4m3_max, recipe.error == "mae", recipe.half_error


@cache
def reciprocal(factor: float) -> float:
    """Return `1 / factor`, both rounded to FP32."""
    return float(np.float32(1) / np.float32(factor))
