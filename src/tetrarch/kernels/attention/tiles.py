# SPDX-License-Identifier: Apache-2.0
"""How Triton's attention kernels are cut into tiles: one table, no search at start.

Measured by `benchmarks/attention_tiles.py`. Tiles follow from a layer and from the device, never
from a step, so that a row keeps its bits whatever is in the batch with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["Tile", "prompt_tile", "shared_room", "span_tile", "sum_chunk"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Compile-time choices of one attention kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


def shared_room(major: int, shared_bytes: int) -> int:
    """Return what tiles may take of a block's shared memory on compute capability `major`.

    Where accumulators live in tensor memory (10 and above), Triton passes them through up to
    64 KiB of shared memory.
    """
    return shared_bytes - (65_536 if major >= 10 else 0)


def span_tile(
    dims: tuple[int, int], *, rows: int = 64, dtype: torch.dtype, latent: bool, shared_bytes: int
) -> Tile:
    """Return the tile of decoding; `dims` are the padded widths of keys and values.

    `rows`: a sequence's, at most; 64 where they must have a prompt's bits: 16 rows meet another
    instruction.
    """
    if dtype.itemsize == 4:  # three TF32 products for each: small tiles
        tile = Tile(rows=16, keys=32, warps=4, stages=2)
    elif latent:
        tile = Tile(rows=64, keys=64, warps=8, stages=2)
    else:
        keys, rows = 64 if max(dims) <= 128 else 32, 16 if rows <= 16 else 64
        tile = Tile(rows, keys, warps=4, stages=4 if rows == 16 else 3)
    return _fitting(tile, dims, dtype.itemsize, shared_bytes=shared_bytes, latent=latent)


def prompt_tile(
    dims: tuple[int, int], *, dtype: torch.dtype, latent: bool, shared_bytes: int
) -> Tile:
    """Return the tile of prompts: as many keys as `span_tile`, so that they add up alike."""
    tile = span_tile(dims, dtype=dtype, latent=latent, shared_bytes=shared_bytes)
    if dtype.itemsize == 4 or latent:
        return tile
    wide = replace(tile, rows=128, warps=8)
    fits = _fitting(wide, dims, dtype.itemsize, shared_bytes=shared_bytes, latent=latent)
    return fits if fits.keys == tile.keys else tile


def sum_chunk(num_sums: int) -> int:
    """Return how many spans are loaded at once where so many heads' sums are added up.

    Few sums wait for memory: then more of it at once.
    """
    return 32 if num_sums <= 512 else 8


def _fitting(
    tile: Tile, dims: tuple[int, int], itemsize: int, *, shared_bytes: int, latent: bool
) -> Tile:
    """Shrink a tile until queries and `stages` tiles of keys and values fit."""
    widths = sum(dims)
    while True:
        queries = tile.rows * (widths if latent else dims[0])
        if (queries + tile.stages * tile.keys * widths) * itemsize <= shared_bytes - 4096:
            return tile
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > 16:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            return replace(tile, stages=1)
