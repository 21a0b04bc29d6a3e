# SPDX-License-Identifier: Apache-2.0
"""Tiles fit what a GPU has, and decoding's and prompts' hold as many keys."""

from __future__ import annotations

import torch

from tetrarch.kernels.attention import tiles

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_tiles_fit_the_shared_memory_of_every_architecture() -> None:
    for room in (232_448, 166_912, 101_376):
        for dtype, dims, latent in (
            (BF16, (128, 128), False),
            (FP16, (256, 256), False),
            (FP32, (128, 128), False),
            (BF16, (512, 64), True),
        ):
            span = tiles.span_tile(dims, dtype=dtype, latent=latent, shared_bytes=room)
            prompt = tiles.prompt_tile(dims, dtype=dtype, latent=latent, shared_bytes=room)
            assert span.keys == prompt.keys  # or sums would differ
            for tile in (span, prompt):
                queries = tile.rows * (sum(dims) if latent else dims[0])
                keys = tile.stages * tile.keys * sum(dims)
                assert (queries + keys) * dtype.itemsize < room


def test_a_prompts_bits_ask_for_its_rows_in_decoding() -> None:
    room = dict(dtype=BF16, latent=False, shared_bytes=232_448)
    assert tiles.span_tile((128, 128), rows=8, **room).rows == 16
    assert tiles.span_tile((128, 128), **room).rows == 64


def test_few_sums_load_more_at_once() -> None:
    assert tiles.sum_chunk(32) > tiles.sum_chunk(2048)
