# SPDX-License-Identifier: Apache-2.0
"""Compile the row kernels for some architectures: python compile_rows.py 80 90.

Prints a line for each kernel: architecture, name, bytes of shared memory, bytes of the cubin.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from compile_only import compile_for
from tetrarch.kernels.permute.triton import Alignment, align, finalize
from tetrarch.kernels.quantize.triton import encode_rows_per_token, encode_weights, round_rows
from tetrarch.numerics.contract import Recipe

BF16 = torch.bfloat16


def launch(rows: int, width: int) -> None:
    """Launch every kernel once, and the ones with a recipe twice."""
    x, values = torch.zeros(rows, width, dtype=BF16), torch.empty(rows, width, dtype=BF16)
    scale, token_scale = torch.ones(()), torch.empty(rows)
    codes = torch.empty(rows, width // 2, dtype=torch.uint8)
    block_scale = torch.empty(rows, width // 16, dtype=torch.float8_e4m3fn)
    round_rows(x, values=values, token_scale=token_scale)
    round_rows(x, values=values, encode_scale=scale, recipe=Recipe(448, "mae"))
    encode_rows_per_token(x, codes=codes, block_scale=block_scale, token_scale=token_scale)
    packed = dict(codes=codes[None], block_scale=block_scale[None])
    encode_weights(x[None], **packed, global_scale=scale.view(1), amax=torch.empty(1))
    owned = torch.ones(rows, dtype=torch.bool)
    lists, counts = torch.empty(3, 1024, dtype=torch.int32), torch.empty(96 * 65).int()
    rest = dict(num_blocks=lists[2], owned=owned, counts=counts)
    out = Alignment(sorted_slots=lists[0], expert=lists[1], **rest)
    for slots in (64, 8192):
        ids = torch.zeros(slots // 8, 8, dtype=torch.int32)
        align(ids, first_expert=0, num_experts=96, block_tokens=16, out=out)
    weights = torch.ones(rows // 8, 8)
    finalize(x, topk_weights=weights, owned=owned, out=values[: rows // 8])


def main() -> None:
    for arch in map(int, sys.argv[1:]):
        compiled = compile_for(arch)
        launch(16, 2688)
        for name, kernel in compiled:
            sys.stdout.write(f"{arch} {name} {kernel.metadata.shared} {len(kernel.asm['cubin'])}\n")


if __name__ == "__main__":
    main()
