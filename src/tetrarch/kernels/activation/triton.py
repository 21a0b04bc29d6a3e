# SPDX-License-Identifier: Apache-2.0
"""Expert activations in Triton, alone or with the rounding of their result in the same kernel.

One program holds whole rows: the second GEMM's input never exists unrounded in memory.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0913

from __future__ import annotations

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.core.units import ceil_div
from tetrarch.kernels.quantize.triton import recipe_constants, reciprocal, tile_shape
from tetrarch.kernels.quantize.triton_blocks import round_halves, round_tile
from tetrarch.numerics.blocks import BLOCK, check_recipe
from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.scales import TOKEN_FACTOR

__all__ = ["Activation", "activate", "activate_round"]


class Activation(Protocol):
    """Which activation: `moe.types.ExpertActivation` is one."""

    @property
    def gated(self) -> bool:
        """SwiGLU of gate and up; otherwise relu² of up."""
        ...

    @property
    def alpha(self) -> float:
        """Steepness of the sigmoid."""
        ...

    @property
    def beta(self) -> float:
        """Added to up."""
        ...

    @property
    def limit(self) -> float:
        """Bound of gate, from above, and of up, from both sides."""
        ...


@triton.jit
def _swiglu(gate, up, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """Return `g * sigmoid(alpha * g) * (u + beta)`; NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    gated = tl.div_rn(gate, 1.0 + tl.exp(gate * -ALPHA))
    return gated * (up + BETA)


@triton.jit
def _activated(gate_up, at, mask, WIDTH: tl.constexpr, FORMULA: tl.constexpr):
    """Load and activate in FP32; NaN where nothing is."""
    first = tl.load(gate_up + at, mask=mask, other=float("nan")).to(tl.float32)
    if FORMULA is not None:
        up = tl.load(gate_up + WIDTH + at, mask=mask, other=float("nan")).to(tl.float32)
        result = _swiglu(first, up, FORMULA[0], FORMULA[1], FORMULA[2])
    else:
        up = tl.maximum(first, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = up * up
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _activate_rows(
    gate_up,
    values,
    token_scale,
    encode_scale,
    owned,
    num_rows,
    top,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FORMULA: tl.constexpr,
    QUANTIZE: tl.constexpr,
    RECIPE: tl.constexpr,
):
    """Activate, and round where `QUANTIZE` says so, `ROWS` rows of `BLOCKS` blocks a program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    exists = row < num_rows
    if owned is not None:
        exists = exists & (tl.load(owned + row, mask=exists, other=0) != 0)
        if tl.max(exists.to(tl.int32), axis=0) == 0:
            return
    width: tl.constexpr = BLOCKS * 16
    stride: tl.constexpr = width * 2 if FORMULA is not None else width
    gate_up += first * stride
    values += first * width
    dtype = values.dtype.element_ty
    local, block = tl.arange(0, ROWS)[:, None, None], tl.arange(0, TILE)[None, :, None]
    mask = exists[:, None, None] & (block < BLOCKS)
    encode = None
    if encode_scale is not None:
        encode = tl.load(encode_scale) + tl.zeros((ROWS,), tl.float32)
    if RECIPE is None:
        column = block * 16 + tl.arange(0, 16)[None, None, :]
        result = _activated(gate_up, local * stride + column, mask, width, FORMULA)
        if QUANTIZE:
            if encode_scale is None:  # as if it had been stored
                result = result.to(dtype).to(tl.float32)
            result, scales, decode = round_tile(result, encode, top)
            result = result * scales[:, :, None]
        tl.store(values + local * width + column, result.to(dtype), mask=mask)
    else:
        column = block * 16 + tl.arange(0, 8)[None, None, :]
        left = _activated(gate_up, local * stride + column, mask, width, FORMULA)
        right = _activated(gate_up, local * stride + column + 8, mask, width, FORMULA)
        if encode_scale is None:
            left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
        left, right, scales, decode = round_halves(left, right, encode, top, RECIPE)
        left, right = left * scales[:, :, None], right * scales[:, :, None]
        tl.store(values + local * width + column, left.to(dtype), mask=mask)
        tl.store(values + local * width + column + 8, right.to(dtype), mask=mask)
    if token_scale is not None:
        tl.store(token_scale + row, decode, mask=exists)


def activate(
    gate_up: Tensor, activation: Activation, *, out: Tensor, owned: Tensor | None = None
) -> None:
    """Activate rows in FP32 and round the result to `out`'s dtype.

    Args:
        gate_up: (N, 2I) gate before up, or (N, I) where not gated; bf16, fp16 or fp32,
            contiguous; I a multiple of 16.
        activation: Which one.
        out: (N, I), overwritten.
        owned: (N,) bool, the rows that exist; others are neither read nor written.

    Source: `kernels.activation.reference`, up to the last bits of an exponential.
    """
    _launch(gate_up, activation, values=out, owned=owned)


def activate_round(
    gate_up: Tensor,
    activation: Activation,
    *,
    values: Tensor,
    token_scale: Tensor | None = None,
    encode_scale: Tensor | None = None,
    factor: float = TOKEN_FACTOR,
    recipe: Recipe | None = None,
    owned: Tensor | None = None,
) -> None:
    """Activate rows, round them to NVFP4 and keep the exact products code * block_scale.

    Under a scale for each token the activation is rounded to `values`' dtype first, as if it had
    been stored; under a static scale it is rounded once, straight from FP32.

    Args:
        gate_up: As for `activate`.
        activation: Which one.
        values: (N, I) of the model's dtype, overwritten.
        token_scale: (N,) fp32, overwritten with each row's decode scale.
        encode_scale: () fp32; given instead of `token_scale`, all rows share it.
        factor: Token scale over a row's largest magnitude.
        recipe: 4-over-6, or `None`.
        owned: (N,) bool, the rows that exist; others are neither read nor written.

    Raises:
        ConfigError: There is no such recipe, or not with this factor.
    """
    check_recipe(recipe, None if token_scale is None else factor)
    _launch(
        gate_up,
        activation,
        values=values,
        token_scale=token_scale,
        encode_scale=encode_scale,
        owned=owned,
        top=reciprocal(factor),
        recipe=recipe,
        quantize=True,
    )


def _launch(
    gate_up: Tensor,
    activation: Activation,
    *,
    values: Tensor,
    owned: Tensor | None,
    token_scale: Tensor | None = None,
    encode_scale: Tensor | None = None,
    top: float = 1.0,
    recipe: Recipe | None = None,
    quantize: bool = False,
) -> None:
    num_rows, width = values.shape
    if num_rows == 0:
        return
    limit = None if activation.limit == math.inf else activation.limit
    rows, warps = tile_shape(num_rows, width)
    _activate_rows[(ceil_div(num_rows, rows),)](
        gate_up,
        values,
        token_scale,
        encode_scale,
        None if owned is None else owned.view(torch.uint8),
        num_rows,
        top,
        BLOCKS=width // BLOCK,
        TILE=triton.next_power_of_2(width // BLOCK),
        ROWS=rows,
        FORMULA=(activation.alpha, activation.beta, limit) if activation.gated else None,
        QUANTIZE=quantize,
        RECIPE=recipe_constants(recipe),
        num_warps=warps,
        enable_fp_fusion=False,
    )
