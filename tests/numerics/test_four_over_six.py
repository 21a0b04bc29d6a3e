# SPDX-License-Identifier: Apache-2.0
"""4-over-6, in all its variants, against FlashInfer's reference."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.four_over_six import element_scale
from tetrarch.numerics.nvfp4 import decode, encode, encode_per_token, encode_weight
from tetrarch.numerics.scales import FP32_MAX, amax_of, encode_scale_from_amax, token_scales

SETS = ("rand_bf16", "weight_bf16", "heavy_bf16", "hard_bf16", "hard_fp16", "hardgs1_bf16")
VARIANTS = [
    (f"{scope}_{top}_{error.upper()}_{metric}", Recipe(top, error, half_error=metric == "fp16err"))
    for scope, top, error, metric in product(
        ("tensor", "token"), (448, 256), ("mae", "mse"), ("exacterr", "fp16err")
    )
]


def _agree_but_for_the_sign_of_zero(codes: Tensor, expected: Tensor, x: Tensor) -> int:
    """The reference loses the sign of -0, which kernels keep outside blocks of zeros."""
    masked = 0
    for shift in (0, 4):
        mine, other = (codes >> shift) & 15, (expected >> shift) & 15
        elements = x[:, shift // 4 :: 2]
        minus_zero = torch.signbit(elements) & (elements == 0)
        differs = mine != other
        assert (differs <= minus_zero).all()
        assert (mine[differs] == 8).all()
        masked += int(differs.sum())
    return masked


@pytest.mark.parametrize(("tag", "recipe"), VARIANTS, ids=[tag for tag, _ in VARIANTS])
@pytest.mark.parametrize("name", SETS)
def test_every_variant_has_the_references_bytes(
    golden: Path, name: str, tag: str, recipe: Recipe
) -> None:
    vectors = load_file(golden / f"flashinfer_4over6_{name}.safetensors")
    x = load_file(golden / f"flashinfer_{name}.safetensors")["x"]
    scale = vectors[f"{tag}.scale"].float()
    if tag.startswith("token"):
        codes, block_scale, token_scale = encode_per_token(
            x, factor=recipe.token_factor, recipe=recipe
        )
        assert torch.equal(token_scale, scale.flatten())
    else:
        encode_scale = encode_scale_from_amax(amax_of(x), recipe.token_factor)
        assert torch.equal(encode_scale.reciprocal(), scale)
        codes, block_scale = encode(x, encode_scale=encode_scale, recipe=recipe)
    assert torch.equal(block_scale.view(torch.uint8), vectors[f"{tag}.sf"])
    masked = _agree_but_for_the_sign_of_zero(codes, vectors[f"{tag}.packed"], x)
    blocks = x.unflatten(-1, (-1, 16))
    minus_zero = torch.signbit(blocks) & (blocks == 0) & (blocks != 0).any(-1, keepdim=True)
    assert masked == int(minus_zero.sum())


@pytest.mark.parametrize("top", [448, 256])
def test_a_weight_uses_the_range_of_its_recipe(golden: Path, top: int) -> None:
    vectors = load_file(golden / "flashinfer_4over6_weight_bf16.safetensors")
    x = load_file(golden / "flashinfer_weight_bf16.safetensors")["x"]
    recipe = Recipe(top, "mse", half_error=True)
    codes, block_scale, global_scale = encode_weight(x, recipe)
    assert global_scale.item() == pytest.approx(amax_of(x).item() / (6 * top), rel=1e-7)
    # Its scale is made by another division than the vectors': one step of FP32 apart, at most.
    assert global_scale.item() == pytest.approx(
        vectors[f"tensor_{top}_MSE_fp16err.scale"].item(), rel=2**-22
    )
    encoded = encode(x, encode_scale=global_scale.reciprocal(), recipe=recipe)
    assert torch.equal(codes, encoded[0])
    assert torch.equal(block_scale.view(torch.uint8), encoded[1].view(torch.uint8))


@pytest.mark.parametrize("name", SETS)
def test_given_scales_per_row_measure_the_error_by_the_rows_largest(
    golden: Path, name: str
) -> None:
    """`encode` with a scale a row chooses as `encode_per_token` does, if told the row's amax."""
    x = load_file(golden / f"flashinfer_{name}.safetensors")["x"]
    recipe = Recipe(448, "mse")
    row_amax = x.float().abs().amax(-1, keepdim=True)
    encode_scale, _ = token_scales(row_amax, recipe.token_factor)
    codes, block_scale = encode(x, encode_scale=encode_scale, recipe=recipe, row_amax=row_amax)
    want = encode_per_token(x, factor=recipe.token_factor, recipe=recipe)
    assert torch.equal(codes, want[0])
    assert torch.equal(block_scale.view(torch.uint8), want[1].view(torch.uint8))
    # Negative control: told another amax, it measures another error and chooses differently.
    wrong, _ = encode(x, encode_scale=encode_scale, recipe=recipe, row_amax=2 * row_amax)
    assert not torch.equal(wrong, codes)


def test_minus_zero_loses_its_sign_in_a_block_of_zeros_only() -> None:
    x = torch.full((1, 32), -0.0)
    x[0, 16] = 3.0
    codes, _ = encode(x, encode_scale=torch.tensor(1.0), recipe=Recipe())
    assert codes[0, :8].tolist() == [0] * 8
    assert codes[0, 9:].tolist() == [0x88] * 7


def test_a_block_between_four_and_six_takes_the_larger_scale_and_errs_less() -> None:
    """Elements at 5/6 of the largest fall into E2M1's widest gap; 4-over-6 is for them."""
    x = torch.full((1, 16), 5.0)
    x[0, 0] = 6.0
    scale = torch.tensor(64.0)
    plain = decode(*encode(x, encode_scale=scale)) / scale
    better = decode(*encode(x, encode_scale=scale, recipe=Recipe(error="mse"))) / scale
    assert (better - x).square().sum() < (plain - x).square().sum()


def test_a_tie_keeps_six() -> None:
    x = torch.zeros(1, 16)
    x[0, 0] = 6.0  # exact under both scales
    _, with_recipe = encode(x, encode_scale=torch.tensor(1.0), recipe=Recipe())
    _, plain = encode(x, encode_scale=torch.tensor(1.0))
    assert with_recipe.float().item() == plain.float().item() == 1.0


def test_a_block_scale_of_zero_multiplies_by_the_largest_number() -> None:
    scales = torch.tensor([0.0, 2.0])
    assert element_scale(scales, torch.tensor(0.25)).tolist() == [FP32_MAX, 2.0]
