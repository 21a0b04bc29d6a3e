# SPDX-License-Identifier: Apache-2.0
"""Layouts of block scales and of gate and up rows, as GPU kernels want them.

Canonical is linear: `scale[row, k / 16]`, gate before up. A runner changes layout in `pack`, never
in place.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tetrarch.core.errors import ShapeError

__all__ = ["interleave_gate_up", "mma_view", "swizzle_128x4", "unswizzle_128x4"]

# One tile of block scales, 512 bytes: 4 quarters of 32 rows, 4 columns.
_QUARTERS, _QUARTER, _COLUMNS = 4, 32, 4
_ROWS = _QUARTERS * _QUARTER


def swizzle_128x4(block_scale: Tensor) -> Tensor:
    """Lay block scales out in tiles of 128 rows by 4 columns.

    Within a tile, byte `16 * (row % 32) + 4 * (row // 32) + column`. Tiles follow each other along
    the columns, then along the rows. Each matrix of a batch is padded and swizzled by itself.

    Args:
        block_scale: (..., M, C) of a one-byte dtype, linear; C = K / 16.

    Returns:
        (..., M rounded up to 128, C rounded up to 4), contiguous, padded with zero bytes. The
        shape only counts the bytes: their rows and columns are no longer those of the scales.

    Source: cuBLAS, layout of 1D block scaling factors; golden/layouts.
    """
    *lead, rows, columns = block_scale.shape
    padded = pad(block_scale.view(torch.uint8), (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    grid = (padded.shape[-2] // _ROWS, padded.shape[-1] // _COLUMNS)
    tiles = padded.view(*lead, grid[0], _QUARTERS, _QUARTER, grid[1], _COLUMNS)
    return tiles.transpose(-4, -2).reshape(padded.shape).view(block_scale.dtype)


def unswizzle_128x4(swizzled: Tensor, *, rows: int, columns: int) -> Tensor:
    """Undo `swizzle_128x4`.

    Args:
        swizzled: (..., M rounded up to 128, C rounded up to 4), contiguous.
        rows: M.
        columns: C.

    Returns:
        (..., M, C), linear, contiguous.

    Raises:
        ShapeError: The shape is not whole tiles, or not those of M rows and C columns.
    """
    grid = _grid_of(swizzled)
    if grid != (-(-rows // _ROWS), -(-columns // _COLUMNS)):
        raise ShapeError(
            f"{rows} x {columns} block scales in {tuple(swizzled.shape)} bytes",
            why="another number of rows or columns was swizzled into these tiles",
            fix="pass the shape that the linear scales had",
        )
    tiles = swizzled.view(*swizzled.shape[:-2], *grid, _QUARTER, _QUARTERS, _COLUMNS)
    linear = tiles.transpose(-4, -2).reshape(swizzled.shape)
    return linear[..., :rows, :columns].contiguous()


def mma_view(swizzled: Tensor) -> Tensor:
    """View swizzled scales with one axis for each part of their address, as CuTe DSL takes them.

    Args:
        swizzled: (E, M, C) of whole tiles, contiguous, from `swizzle_128x4`.

    Returns:
        (32, 4, M / 128, 4, C / 4, E), sharing the bytes; indexed by `row % 32`,
        `row % 128 // 32`, `row // 128`, `column % 4`, `column // 4` and the expert.

    Raises:
        ShapeError: The shape is not whole tiles.

    Source: FlashInfer 0.7.4 `convert_sf_to_mma_layout`, golden/layouts.
    """
    grid = _grid_of(swizzled)
    tiles = swizzled.view(swizzled.shape[0], *grid, _QUARTER, _QUARTERS, _COLUMNS)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def interleave_gate_up(gate_up: Tensor, *, chunk: int = 64) -> Tensor:
    """Interleave rows as the fused GEMM and SwiGLU kernels read them: up, gate, up, gate, ...

    Args:
        gate_up: (..., 2I, W), gate before up: packed codes, or linear block scales.
        chunk: Rows of one half before the other follows.

    Returns:
        (..., 2I, W), contiguous: `up[:chunk]`, `gate[:chunk]`, `up[chunk:2 * chunk]`, ...

    Raises:
        ShapeError: I is not a multiple of `chunk`.

    Source: SGLang 0.5.23 `interleave_w13_halves`, golden/layouts.
    """
    *lead, rows, width = gate_up.shape
    if rows % (2 * chunk):
        raise ShapeError(
            f"{rows} rows of gate and up cannot be interleaved in chunks of {chunk}",
            why="each half must be whole chunks",
            fix="choose a runner without interleaved weights for this intermediate size",
        )
    halves = gate_up.view(*lead, 2, rows // (2 * chunk), chunk, width)
    return halves.flip(-4).transpose(-4, -3).reshape(gate_up.shape)


def _grid_of(swizzled: Tensor) -> tuple[int, int]:
    rows, columns = swizzled.shape[-2:]
    if rows % _ROWS or columns % _COLUMNS:
        raise ShapeError(
            f"{tuple(swizzled.shape)} bytes are not swizzled block scales",
            why=f"they come in tiles of {_ROWS} x {_COLUMNS}",
            fix="pass what swizzle_128x4 returned",
        )
    return rows // _ROWS, columns // _COLUMNS
