# SPDX-License-Identifier: Apache-2.0
"""Round rows to NVFP4 in Triton: bit for bit what `numerics.nvfp4` says.

One program holds whole rows, so that a row is read once: largest magnitude, scales and codes come
from registers.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0913, PLR0915

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.core.units import ceil_div
from tetrarch.kernels.quantize.triton_blocks import (
    code_words,
    e4m3_bytes,
    round_halves,
    round_tile,
)
from tetrarch.numerics.blocks import BLOCK, check_recipe
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe
from tetrarch.numerics.scales import TOKEN_FACTOR

__all__ = [
    "encode_rows",
    "encode_rows_per_token",
    "encode_shape",
    "encode_weights",
    "recipe_constants",
    "reciprocal",
    "round_rows",
    "tile_shape",
]


@triton.jit(do_not_specialize=["num_rows", "rows_per_scale"])
def _quantize_rows(
    x,
    values,
    codes,
    block_scale,
    token_scale,
    encode_scale,
    num_rows,
    rows_per_scale,
    top,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Quantize `ROWS` rows of `BLOCKS` blocks in each program, to products or to packed codes.

    Encode scales are read, or are the rows' own.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    exists = row < num_rows
    local, block = tl.arange(0, ROWS)[:, None] * BLOCKS, tl.arange(0, TILE)[None, :]
    inside = exists[:, None] & (block < BLOCKS)
    mask = inside[:, :, None]
    x += first * (BLOCKS * 16)
    if encode_scale is not None:
        encode = tl.load(encode_scale + row // rows_per_scale, mask=exists, other=1.0)
    else:
        encode = None
    if RECIPE is None:
        at = ((local + block) * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
        tile = tl.load(x + at, mask=mask, other=float("nan")).to(tl.float32)
        numbers, scales, decode = round_tile(tile, encode, top)
        if values is not None:
            values += first * (BLOCKS * 16)
            products = numbers * scales[:, :, None]
            tl.store(values + at, products.to(values.dtype.element_ty), mask=mask)
        else:
            words = code_words(tl.reshape(numbers, (ROWS, TILE * 2, 8)))
    else:
        at = ((local + block) * 16)[:, :, None] + tl.arange(0, 8)[None, None, :]
        left = tl.load(x + at, mask=mask, other=float("nan"))
        right = tl.load(x + 8 + at, mask=mask, other=float("nan"))
        left, right, scales, decode = round_halves(
            left, right, encode, top, RECIPE, CODES=values is None
        )
        if values is not None:
            values += first * (BLOCKS * 16)
            left, right = left * scales[:, :, None], right * scales[:, :, None]
            tl.store(values + at, left.to(values.dtype.element_ty), mask=mask)
            tl.store(values + 8 + at, right.to(values.dtype.element_ty), mask=mask)
        else:
            words = tl.reshape(tl.join(left, right), (ROWS, TILE * 2))
    if values is None:
        word = tl.arange(0, TILE * 2)[None, :]
        word_mask = exists[:, None] & (word < BLOCKS * 2)
        tl.store(codes + first * (BLOCKS * 2) + local * 2 + word, words, mask=word_mask)
        tl.store(block_scale + first * BLOCKS + local + block, e4m3_bytes(scales), mask=inside)
    if token_scale is not None:
        tl.store(token_scale + row, decode, mask=exists)


@triton.jit
def _encode_blocks(x, codes, block_scale, first, blocks, encode, top, RECIPE, TILE: tl.constexpr):
    """Encode `TILE` blocks from the `first` one of a matrix, as far as it has them."""
    block = first + tl.arange(0, TILE)[None, :]
    inside = block < blocks
    at, mask = (block * 16)[:, :, None], inside[:, :, None]
    low = tl.arange(0, 8)[None, None, :]
    if RECIPE is None:
        at += tl.arange(0, 16)[None, None, :]
        tile = tl.load(x + at, mask=mask, other=float("nan")).to(tl.float32)
        numbers, scales, _ = round_tile(tile, encode, top)
        words = code_words(tl.reshape(numbers, (1, TILE * 2, 8)))
    else:
        left = tl.load(x + (at + low), mask=mask, other=float("nan"))
        right = tl.load(x + (at + 8 + low), mask=mask, other=float("nan"))
        left, right, scales, _ = round_halves(left, right, encode, top, RECIPE, CODES=True)
        words = tl.reshape(tl.join(left, right), (1, TILE * 2))
    word = first * 2 + tl.arange(0, TILE * 2)[None, :]
    tl.store(codes + word, words, mask=word < blocks * 2)
    tl.store(block_scale + block, e4m3_bytes(scales), mask=inside)


@triton.jit(do_not_specialize=["blocks", "tiles", "matrices"])
def _encode_matrices(
    x,
    codes,
    block_scale,
    global_scale,
    amax,
    state,
    matrices,
    blocks,
    tiles,
    top,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Look for the largest magnitude in a part of one matrix, and encode as much of the one before.

    A matrix is encoded while the cache still holds it, and the tensor that is read keeps memory
    busy while the other one is calculated. Programs take numbers as they start (`state[0]`), so
    that the parts that one waits for have been started; `state` then has for each matrix the
    programs that have looked, and the bits of the largest magnitude.
    """
    ticket = tl.atomic_add(state, 1, sem="relaxed")
    matrix, part = ticket // tiles, ticket % tiles
    looked, largest_bits = state + 1, state + 1 + matrices
    if matrix < matrices:
        start = x + matrix.to(tl.int64) * blocks * 16
        at = part * (STEPS * TILE * 16) + tl.arange(0, STEPS * TILE * 16)
        values = tl.load(start + at, mask=at < blocks * 16, other=0.0)
        largest = tl.max(tl.abs(values), axis=0).to(tl.float32)  # of numbers, if there are any
        largest = tl.minimum(tl.where(largest == largest, largest, 0.0), LARGEST)
        tl.atomic_max(largest_bits + matrix, largest.to(tl.int32, bitcast=True), sem="relaxed")
        tl.atomic_add(looked + matrix, 1, sem="release")
    if matrix > 0:
        matrix -= 1
        while tl.atomic_add(looked + matrix, 0, sem="acquire") < tiles:
            pass
        bits = tl.atomic_max(largest_bits + matrix, 0, sem="relaxed")
        largest = bits.to(tl.float32, bitcast=True)
        scale = tl.where(largest > 0.0, tl.div_rn(largest, top), 1.0)
        if part == 0:
            tl.store(global_scale + matrix, scale)
            tl.store(amax + matrix, largest)
        encode = tl.zeros((1,), tl.float32) + tl.div_rn(1.0, scale)
        before = matrix.to(tl.int64) * blocks
        for step in range(STEPS):
            _encode_blocks(
                x + before * 16, codes + before * 2, block_scale + before,
                (part * STEPS + step) * TILE, blocks, encode, top, RECIPE, TILE,
            )  # fmt: skip


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
    matrices, blocks = x.shape[0], x[0].numel() // BLOCK
    tile, steps, warps = encode_shape(matrices * blocks)
    tiles = ceil_div(blocks, tile * steps)
    _encode_matrices[((matrices + 1) * tiles,)](
        x,
        codes.view(torch.int32),
        block_scale.view(torch.uint8),
        global_scale,
        amax,
        torch.zeros(2 * matrices + 1, dtype=torch.int32, device=x.device),
        matrices,
        blocks,
        tiles,
        6.0 * (recipe.e4m3_max if recipe else 448),
        LARGEST=torch.finfo(x.dtype).max,
        TILE=tile,
        STEPS=steps,
        RECIPE=recipe_constants(recipe),
        num_warps=warps,
        enable_fp_fusion=False,
    )


def encode_shape(num_blocks: int) -> tuple[int, int, int]:
    """Return how many blocks are encoded at once, how many times in a program, and warps.

    A single matrix has too few blocks for programs that amortize their start.
    """
    return (128, 8, 4) if num_blocks >= 1 << 20 else (256, 2, 4)


def _launch(
    x: Tensor,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    *,
    encode_scale: Tensor | None,
    top: float,
    recipe: Recipe | None,
) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    values, codes, block_scale, token_scale = outputs
    rows, warps = tile_shape(num_rows, width)
    _quantize_rows[(ceil_div(num_rows, rows),)](
        x,
        values,
        None if codes is None else codes.view(torch.int32),
        None if block_scale is None else block_scale.view(torch.uint8),
        token_scale,
        encode_scale,
        num_rows,
        1 if encode_scale is None else num_rows // encode_scale.numel(),
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
    padded = 1 << (width - 1).bit_length()
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
