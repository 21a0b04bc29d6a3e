# SPDX-License-Identifier: Apache-2.0
"""Tiles fit the weights and the worst routing."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tetrarch.kernels.grouped_gemm.packing import K_BLOCK, ROW_BLOCK, padded
from tetrarch.kernels.grouped_gemm.tiles import block_tokens, max_blocks, tile_for


def test_every_tile_divides_every_stored_weight() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = itertools.product((1, 9, 33, 1000, 100_000), (16, 48, 768, 2048, 2880), dtypes)
    for (slots, width, dtype), packed in itertools.product(cases, (True, False)):
        tokens = block_tokens(slots, 4, packed=packed)
        tile = tile_for(tokens, width, packed=packed, dtype=dtype, ptx=True)
        assert tile.tokens == tokens
        assert ROW_BLOCK % tile.rows == 0
        assert padded(1, width)[1] // K_BLOCK % tile.k_blocks == 0
        assert tile.ptx == (packed and dtype == torch.bfloat16)


@pytest.mark.parametrize("tokens", [16, 128])
def test_no_routing_forms_more_blocks_than_there_are_programs(tokens: int) -> None:
    rng = random.Random(0)
    for _ in range(200):
        experts, slots = rng.randint(1, 9), rng.randint(0, 600)
        skew = rng.choice((0.0, 1.0, 3.0))
        chosen = rng.choices(range(experts), [(1 + e) ** -skew for e in range(experts)], k=slots)
        counts = [chosen.count(e) for e in range(experts)]
        assert sum(-(-count // tokens) for count in counts) <= max_blocks(slots, experts, tokens)
