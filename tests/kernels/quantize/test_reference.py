# SPDX-License-Identifier: Apache-2.0
"""The quantize operation is the format's own definition, under a kernel's signature."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tetrarch.kernels.quantize.reference import quantize_per_tensor, quantize_per_token
from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.nvfp4 import decode, encode, encode_per_token

ROWS = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_per_token_is_the_definition() -> None:
    for mine, defined in zip(quantize_per_token(ROWS), encode_per_token(ROWS), strict=True):
        assert torch.equal(mine.view(torch.uint8), defined.view(torch.uint8))


def test_per_tensor_takes_a_scale_that_decodes() -> None:
    """An input scale s decodes: the values come back as code * block_scale * s."""
    input_scale = ROWS.float().abs().max() / 2688
    codes, block_scale = quantize_per_tensor(ROWS, input_scale=input_scale)
    defined = encode(ROWS, encode_scale=1 / input_scale)
    assert torch.equal(codes, defined[0])
    back = decode(codes, block_scale, global_scale=input_scale)
    assert (back - ROWS.float()).abs().max() <= ROWS.float().abs().max() / 6 + 1e-6


@pytest.mark.parametrize("name", ["rand_bf16", "weight_bf16", "heavy_bf16", "hard_fp16"])
@pytest.mark.parametrize(
    ("key", "factor"), [("fi_exact_token", 1 / 2688), ("fi_exact_token_gsinv1", 1.0)]
)
def test_rows_have_flashinfers_bytes_under_either_factor(
    golden: Path, name: str, key: str, factor: float
) -> None:
    vectors = load_file(golden / f"flashinfer_{name}.safetensors")
    codes, block_scale, _ = quantize_per_token(vectors["x"], factor=factor)
    assert torch.equal(codes, vectors[f"{key}.packed"])
    assert torch.equal(block_scale.view(torch.uint8), vectors[f"{key}.sf"])


def test_a_recipe_reaches_the_definition() -> None:
    recipe = Recipe(256, "mse")
    per_token = quantize_per_token(ROWS, factor=recipe.token_factor, recipe=recipe)
    plain = quantize_per_token(ROWS, factor=recipe.token_factor)
    assert torch.equal(
        per_token[0], encode_per_token(ROWS, factor=recipe.token_factor, recipe=recipe)[0]
    )
    assert not torch.equal(per_token[0], plain[0])
    scale = torch.tensor(1 / 512)
    codes, _ = quantize_per_tensor(ROWS, input_scale=scale, recipe=recipe)
    assert torch.equal(codes, encode(ROWS, encode_scale=1 / scale, recipe=recipe)[0])
    assert not torch.equal(codes, quantize_per_tensor(ROWS, input_scale=scale)[0])
