# SPDX-License-Identifier: Apache-2.0
"""Products of rows and a weight in Triton: a row's bits do not depend on how many rows there are.

A library chooses its kernel by the shape of the product, and may cut K among programs. Here one
program adds up all of K, in the same steps whatever the tile; weights are the tensor cores' first
operand, so that a tile of few rows takes few of their columns.

For a single row there is a second kernel, without tensor cores, which reads the weight faster than
cuBLAS. Its sums are in another order.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0913

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.core.units import ceil_div

__all__ = ["Tile", "multiply", "multiply_heads", "multiply_row", "tile_for"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share, and how it is compiled."""

    columns: int  # of the result: rows of the weight
    rows: int
    step: int  # along K
    warps: int
    stages: int


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tile(
    rows,
    weight,
    bias,
    out,
    num_rows,
    rows_batch,
    rows_row,
    weight_batch,
    weight_column,
    weight_k,
    out_batch,
    out_row,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute a tile; programs that share weights are neighbours."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    m = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    n_in, m_in = n < NUM_COLUMNS, m < num_rows
    weights = weight + batch * weight_batch + n[:, None].to(tl.int64) * weight_column
    weights += k[None, :] * weight_k
    operands = rows + batch * rows_batch + m[None, :].to(tl.int64) * rows_row + k[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, WIDTH, STEP):
        w_in, x_in = n_in[:, None], m_in[None, :]
        if WIDTH % STEP != 0:
            w_in, x_in = w_in & (start + k < WIDTH)[None, :], x_in & (start + k < WIDTH)[:, None]
        w = tl.load(weights + start * weight_k, mask=w_in, other=0.0)
        x = tl.load(operands + start, mask=x_in, other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
    places = out + batch * out_batch + m[:, None].to(tl.int64) * out_row + n[None, :]
    values = tl.trans(total).to(out.dtype.element_ty)
    tl.store(places, values, mask=m_in[:, None] & n_in[None, :])


@triton.jit
def _multiply_row(
    row,
    weight,
    bias,
    out,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute some columns of one row."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    n_in = n < NUM_COLUMNS
    weights = weight + n[:, None].to(tl.int64) * WIDTH + k[None, :]
    total = tl.zeros((COLUMNS, STEP), tl.float32)
    for start in range(0, WIDTH, STEP):
        k_in = start + k < WIDTH
        w = tl.load(weights + start, mask=n_in[:, None] & k_in[None, :], other=0.0)
        x = tl.load(row + start + k, mask=k_in, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    found = tl.sum(total, axis=1)
    if bias is not None:
        found += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n_in)


def tile_for(num_rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile for so many rows."""
    if dtype == torch.float32:
        return Tile(32, 32, step=32, warps=4, stages=2)
    if num_rows <= 16:
        return Tile(16, 16, step=256, warps=4, stages=4)
    if num_rows <= 64:
        return Tile(64, 64, step=64, warps=4, stages=4)
    return Tile(128, 128, step=64, warps=8, stages=3)


def multiply(
    rows: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply rows by a weight.

    Args:
        rows: (M, K), any M.
        weight: (N, K), same dtype; may be a view.
        bias: (N,), added before the result is rounded.
        out: (M, N), overwritten.
        tile: Moves no bit; by default what fits M.

    Returns:
        (M, N) in the dtype of `rows`; `out` if given.
    """
    out = rows.new_empty(len(rows), len(weight)) if out is None else out
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    _launch(rows[None], weight[None], bias, out[None], tile)
    return out


def multiply_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's rows by its own weight: (T, H, K), (H, K, N) -> (T, H, N).

    The last dimension of `rows` is contiguous; the weight may be a view.
    """
    out = rows.new_empty(rows.shape[0], rows.shape[1], weight.shape[2])
    _launch(rows.transpose(0, 1), weight.mT, None, out.transpose(0, 1), None)
    return out


def _launch(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile | None
) -> None:
    """Multiply (B, M, K) and (B, N, K) into (B, M, N)."""
    (batches, num_rows, width), columns = rows.shape, weight.shape[1]
    if num_rows == 0:
        return
    tile = tile or tile_for(num_rows, rows.dtype)
    tiles = ceil_div(num_rows, tile.rows) * ceil_div(columns, tile.columns)
    _multiply_tile[tiles, batches](
        rows,
        weight,
        bias,
        out,
        num_rows,
        *rows.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        NUM_COLUMNS=columns,
        WIDTH=width,
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        STEP=tile.step,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def multiply_row(row: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply one row by a weight: (1, K) and (N, K), contiguous -> (1, N)."""
    columns, width = weight.shape
    out = row.new_empty(1, columns)
    _multiply_row[(ceil_div(columns, 2),)](
        row,
        weight,
        bias,
        out,
        NUM_COLUMNS=columns,
        WIDTH=width,
        COLUMNS=2,
        STEP=min(2048, triton.next_power_of_2(width)),
        num_warps=2,
    )
    return out
