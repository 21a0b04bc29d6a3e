# SPDX-License-Identifier: Apache-2.0
"""Matrix products in which a row's bits do not depend on how many rows there are.

A library chooses its kernel, hence the order in which it adds along K, by the shape of the whole
product. So every product here has the same shape: rows are cut into tiles, the last one is filled
up with zeros, and each tile is one call. What is left to the library is that a row's place in the
tile, and the other rows, do not matter; tests hold it to that, with operands that cancel so that
any other order of a sum shows in all bits of it.

Untiled, MKL's FP32 product rounds differently at 1, 2, 4, 8 and 16 rows, depending on the weight;
oneDNN's BF16 product at 1, 2, 4, 8, 16 and 64 (torch 2.13, Sapphire Rapids). The number of threads
can still matter: a library may cut K between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROWS", "tiled_bmm", "tiled_linear", "tiled_mm"]

# Rows of a tile. A row alone pays for all of them, many rows pay one call a tile. Microseconds
# for a 256 x 256 weight, one core: BF16 29 at 8 rows, 28 at 16, 31 at 32, 39 at 64, and 29 (oneDNN)
# or 14 (without) untiled; FP32 15 at 4, 24 at 8, 40 at 16, 61 at 32, and 9 untiled.
ROWS = {torch.float32: 8, torch.float64: 8, torch.bfloat16: 32, torch.float16: 32}

_ALIGNMENT = 64  # bytes; a vector load that crosses a line may be split, and summed, differently


def tiled_mm(
    rows: Tensor, weight: Tensor, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply rows by a weight.

    Args:
        rows: (M, K), any M.
        weight: (K, N), same dtype.
        bias: (N,), added before the result is rounded.
        out: (M, N), overwritten.

    Returns:
        (M, N); `out` if given.
    """
    size = ROWS[rows.dtype]
    if len(rows) < size:  # the case of a decode step
        found = _filled_up(rows, size, weight, bias=bias)
        return found if out is None else out.copy_(found)
    if out is None:
        out = rows.new_empty(len(rows), weight.shape[1])
    for tile, target in zip(rows.contiguous().split(size), out.split(size), strict=True):
        if len(tile) == size and tile.data_ptr() % _ALIGNMENT == 0:
            _mm(tile, weight, bias=bias, out=target)
        else:
            target.copy_(_filled_up(tile, size, weight, bias=bias))
    return out


def tiled_linear(
    rows: Tensor, weight: Tensor, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply rows (M, K) by a weight as layers hold it, (N, K)."""
    return tiled_mm(rows, weight.mT, bias=bias, out=out)


def _filled_up(rows: Tensor, size: int, weight: Tensor, *, bias: Tensor | None) -> Tensor:
    """Multiply at most `size` rows, with zeros below them."""
    whole = rows.new_zeros(size, rows.shape[1])
    whole[: len(rows)] = rows
    return _mm(whole, weight, bias=bias)[: len(rows)]


def _mm(tile: Tensor, weight: Tensor, *, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(tile, weight, out=out)
    return torch.addmm(bias, tile, weight, out=out)


def tiled_bmm(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply the rows of B batches, each by its own weight. B must not depend on the rows.

    Args:
        rows: (B, M, K), any M.
        weight: (B, K, N), same dtype.

    Returns:
        (B, M, N).
    """
    size = ROWS[rows.dtype]
    out = rows.new_empty(len(rows), rows.shape[1], weight.shape[2])
    for tile, target in zip(rows.split(size, 1), out.split(size, 1), strict=True):
        whole = rows.new_zeros(len(rows), size, rows.shape[2])
        whole[:, : tile.shape[1]] = tile
        target.copy_(torch.bmm(whole, weight)[:, : tile.shape[1]])
    return out
