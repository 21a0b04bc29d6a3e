# SPDX-License-Identifier: Apache-2.0
"""How the Triton grouped GEMM is cut into tiles: one table, no search at start.

Measured by `benchmarks/experts_tiles.py`. Nothing here moves a bit: sums run along K in the
same steps under every tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tetrarch.core.units import ceil_div
from tetrarch.kernels.grouped_gemm.packing import K_BLOCK, ROW_BLOCK

__all__ = ["BLOCK_TOKENS", "Tile", "block_tokens", "max_blocks", "tile_for"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share, and how it is compiled."""

    rows: int  # of the weight
    tokens: int  # of one expert
    k_blocks: int  # of 64 columns a step
    warps: int
    stages: int  # steps in flight
    ptx: bool = False  # decode by inline PTX: BF16 on NVIDIA GPUs


# Most rows an expert gets on average, and the block they are cut into.
_BLOCKS = ((8, 16), (24, 32), (64, 64))
BLOCK_TOKENS = (*(tokens for _, tokens in _BLOCKS), 128)
_PACKED = {
    16: Tile(64, 16, k_blocks=4, warps=4, stages=3),
    32: Tile(64, 32, k_blocks=2, warps=4, stages=4),
    64: Tile(128, 64, k_blocks=1, warps=4, stages=4),  # 128 tokens: 1.1 to 1.4 times as long
}
_PLAIN = {
    16: Tile(64, 16, k_blocks=2, warps=4, stages=4),
    32: Tile(64, 32, k_blocks=2, warps=4, stages=4),
    64: Tile(128, 64, k_blocks=1, warps=4, stages=4),
    128: Tile(128, 128, k_blocks=1, warps=8, stages=3),
}


def block_tokens(num_slots: int, num_experts: int, *, packed: bool) -> int:
    """Return how many of an expert's rows form one block: 16 to 128, to 64 if packed.

    Args:
        num_slots: Rows of all experts together.
        num_experts: Experts of this rank.
        packed: Weights are NVFP4.
    """
    average = num_slots / num_experts
    return next((tokens for most, tokens in _BLOCKS if average <= most), 64 if packed else 128)


def max_blocks(num_slots: int, num_experts: int, tokens: int) -> int:
    """Return the most blocks of so many tokens that these slots form, however they are routed."""
    visited = min(num_slots, num_experts)
    return visited + (num_slots - visited) // tokens


def tile_for(tokens: int, width: int, *, packed: bool, dtype: torch.dtype, ptx: bool) -> Tile:
    """Return the tile for blocks of so many tokens.

    Args:
        tokens: As `block_tokens` returned it.
        width: K of the weight.
        packed: The weight is NVFP4.
        dtype: Of the rows.
        ptx: The device runs PTX.
    """
    tile = (_PACKED if packed else _PLAIN)[tokens]
    k_blocks = tile.k_blocks
    while ceil_div(width, K_BLOCK) % k_blocks:
        k_blocks //= 2
    if dtype == torch.float32:  # 99 KiB of shared memory are all that sm_89 has
        return replace(tile, rows=min(tile.rows, ROW_BLOCK // 2), k_blocks=1, stages=2)
    ptx = ptx and packed and dtype == torch.bfloat16
    # As many bytes in flight where a step had to become shorter.
    stages = tile.stages + (tile.k_blocks > k_blocks)
    return replace(tile, k_blocks=k_blocks, stages=stages, ptx=ptx)
