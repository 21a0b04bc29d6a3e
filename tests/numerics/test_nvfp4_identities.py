# SPDX-License-Identifier: Apache-2.0
"""What NVFP4 promises by itself: identities, independence of rows, policy at the edges."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.core.errors import ConfigError, ShapeError
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.e2m1 import E2M1_MAGNITUDES
from tetrarch.numerics.scales import amax_of, encode_scale_from_amax

RECIPES = [None, Recipe(), Recipe(448, "mse", half_error=True), Recipe(256, "mse")]


def raw(block_scale: Tensor) -> Tensor:
    return block_scale.view(torch.uint8)


def e4m3(raw_bytes: Tensor) -> Tensor:
    return raw_bytes.view(torch.float8_e4m3fn)


def factor_of(recipe: Recipe | None) -> float:
    return 1 / 2688 if recipe is None else recipe.token_factor


def draw(rows: int, width: int, seed: int) -> Tensor:
    """Normal numbers with gains from 2**-12 to 2**12, one a row."""
    generator = torch.Generator().manual_seed(seed)
    gains = torch.exp2(torch.randint(-12, 13, (rows, 1), generator=generator).float())
    return (torch.randn(rows, width, generator=generator) * gains).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_row_of_nan_is_nan_in_its_block_scales_and_in_nothing_else(
    recipe: Recipe | None,
) -> None:
    rows = torch.stack((torch.full((32,), -torch.nan), torch.linspace(-1, 1, 32)))
    codes, block_scale, token_scale = nvfp4.encode_per_token(
        rows, factor=factor_of(recipe), recipe=recipe
    )
    assert (codes[0] == 0x77).all()
    assert raw(block_scale)[0].tolist() == [0x7F, 0x7F]
    assert token_scale[0].item() == 1.0
    assert nvfp4.decode(codes, block_scale)[0].isnan().all()
    alone = nvfp4.encode_per_token(rows[1:], factor=factor_of(recipe), recipe=recipe)
    assert torch.equal(codes[1:], alone[0])
    assert torch.equal(token_scale[1:], alone[2])


def test_a_row_of_zeros_keeps_its_signs_and_has_no_scale() -> None:
    rows = torch.zeros(2, 16)
    rows[:, ::2] = -0.0
    codes, block_scale, token_scale = nvfp4.encode_per_token(rows)
    assert (codes == 0x08).all()
    assert not raw(block_scale).any()
    assert not token_scale.any()
    # Under 4-over-6 such a block has no signs.
    assert not nvfp4.encode_per_token(rows, recipe=Recipe())[0].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_scaling_one_row_changes_no_other_row_per_token(recipe: Recipe | None) -> None:
    rows = torch.randn(8, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    louder = rows.clone()
    louder[3] *= 1000
    others = torch.arange(8) != 3

    def encoded(values: Tensor) -> list[Tensor]:
        codes, block_scale, token_scale = nvfp4.encode_per_token(
            values, factor=factor_of(recipe), recipe=recipe
        )
        return [codes[others], raw(block_scale)[others], token_scale[others]]

    for before, after in zip(encoded(rows), encoded(louder), strict=True):
        assert torch.equal(before, after)


def test_scaling_one_row_changes_the_others_under_one_dynamic_scale() -> None:
    rows = torch.randn(8, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    louder = rows.clone()
    louder[3] *= 1000
    others = torch.arange(8) != 3

    def encoded(values: Tensor) -> tuple[Tensor, Tensor]:
        return nvfp4.encode(values, encode_scale=encode_scale_from_amax(amax_of(values)))

    for before, after in zip(encoded(rows), encoded(louder), strict=True):
        differing = (before.view(torch.uint8) != after.view(torch.uint8))[others].any(dim=1)
        assert differing.all()


def test_a_weight_without_a_recipe_is_encoded_plainly() -> None:
    weight = draw(32, 64, 6)
    codes, block_scale, global_scale = nvfp4.encode_weight(weight, None)
    plain = nvfp4.encode(weight, encode_scale=global_scale.reciprocal())
    assert torch.equal(codes, plain[0])
    assert torch.equal(raw(block_scale), raw(plain[1]))
    assert not torch.equal(codes, nvfp4.encode_weight(weight)[0])


def test_a_parameter_is_encoded_like_its_values() -> None:
    weight = torch.nn.Parameter(draw(4, 32, 7))
    for mine, other in zip(
        nvfp4.encode_weight(weight), nvfp4.encode_weight(weight.detach()), strict=True
    ):
        assert torch.equal(mine.float(), other.float())
        assert not mine.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_4064_products_are_exact(dtype: torch.dtype) -> None:
    """16 codes by the 254 finite E4M3 bytes, against rational arithmetic."""
    scale_bytes = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    codes = torch.arange(16, dtype=torch.uint8) * 17  # the same code in both nibbles
    codes = codes.view(1, 16, 1).expand(254, 16, 8)
    scales = e4m3(torch.tensor(scale_bytes, dtype=torch.uint8)).view(254, 1, 1).expand(254, 16, 1)
    products = nvfp4.decode_exact_products(codes, scales, dtype)[..., 0].double()
    values = [*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES)]
    exact = [
        [Fraction(value) * Fraction(scale) for value in values]
        for scale in e4m3(torch.tensor(scale_bytes, dtype=torch.uint8)).double().tolist()
    ]
    assert products.numel() == 4064
    assert [[Fraction(p) for p in row] for row in products.tolist()] == exact
    magnitudes = {abs(product) for row in exact for product in row if product}
    assert (min(magnitudes), max(magnitudes)) == (Fraction(1, 1024), 2688)


def test_encoding_what_was_decoded_returns_the_same_bytes() -> None:
    """For every block scale but zero, as long as a block holds the largest code."""
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(256, (126, 64, 8), generator=generator).byte()
    codes[..., 3] |= 7
    block_scale = e4m3(torch.arange(1, 127, dtype=torch.uint8)).view(126, 1, 1).expand(126, 64, 1)
    products = nvfp4.decode_exact_products(codes, block_scale, torch.float32)
    again, scale_again = nvfp4.encode(products, encode_scale=torch.ones(()))
    assert torch.equal(again, codes)
    assert torch.equal(raw(scale_again), raw(block_scale.contiguous()))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_quantization_equals_encoding_and_decoding(
    golden: Path, recipe: Recipe | None, dtype: torch.dtype
) -> None:
    """Bit for bit, signs of zero included, on the hard rows and on numbers that are not finite."""
    names = ("flashinfer_hard_bf16", "nonfinite_bf16")
    hard = (load_file(golden / f"{name}.safetensors")["x"] for name in names)
    rows = torch.cat((*hard, draw(40, 64, 9)))
    factor = factor_of(recipe)
    codes, block_scale, scale = nvfp4.encode_per_token(rows, factor=factor, recipe=recipe)
    products, token_scale = nvfp4.fake_quant_per_token(
        rows, factor=factor, recipe=recipe, dtype=dtype
    )
    assert_same_bits(products, nvfp4.decode_exact_products(codes, block_scale, dtype))
    assert torch.equal(token_scale, scale)

    encode_scale = torch.tensor(37.0)
    encoded = nvfp4.encode(rows, encode_scale=encode_scale, recipe=recipe)
    products = nvfp4.fake_quant(rows, encode_scale=encode_scale, recipe=recipe, dtype=dtype)
    assert_same_bits(products, nvfp4.decode_exact_products(*encoded, dtype))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    integer = torch.int16 if actual.dtype == torch.bfloat16 else torch.int32
    number = ~actual.isnan()
    assert torch.equal(actual.view(integer)[number], expected.view(integer)[number])


def test_decoding_multiplies_by_a_scale_per_expert() -> None:
    codes = torch.full((3, 2, 8), 0x22, dtype=torch.uint8)
    block_scale = torch.full((3, 2, 1), 2.0).to(torch.float8_e4m3fn)
    scale = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    decoded = nvfp4.decode(codes, block_scale, global_scale=scale, dtype=torch.bfloat16)
    assert torch.equal(decoded, (2 * scale).expand(3, 2, 16).bfloat16())


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32), (2, 3, 32), (32,)])
def test_leading_axes_are_free_and_may_be_empty(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    lead = shape[:-1]
    codes, block_scale, token_scale = nvfp4.encode_per_token(values)
    assert (codes.shape, block_scale.shape, token_scale.shape) == ((*lead, 16), (*lead, 2), lead)
    assert nvfp4.decode(codes, block_scale).shape == shape
    assert nvfp4.decode_exact_products(codes, block_scale).shape == shape
    assert nvfp4.fake_quant(values, encode_scale=torch.ones(())).shape == shape
    flat = nvfp4.encode_per_token(values.reshape(-1, 32))
    assert torch.equal(codes.flatten(), flat[0].flatten())


def test_a_weight_without_rows_has_the_scale_one() -> None:
    codes, block_scale, global_scale = nvfp4.encode_weight(torch.empty(0, 32))
    assert (codes.shape, block_scale.shape) == ((0, 16), (0, 2))
    assert global_scale.item() == 1.0


@pytest.mark.parametrize("shape", [(2, 24), (2, 0), ()])
def test_a_last_axis_that_is_not_whole_blocks_is_refused(shape: tuple[int, ...]) -> None:
    values, one = torch.ones(shape), torch.ones(())
    for call in (
        lambda: nvfp4.encode(values, encode_scale=one),
        lambda: nvfp4.encode_per_token(values),
        lambda: nvfp4.encode_weight(values),
        lambda: nvfp4.fake_quant(values, encode_scale=one),
        lambda: nvfp4.fake_quant_per_token(values),
    ):
        with pytest.raises(ShapeError, match="16 neighbours"):
            call()
    assert issubclass(ShapeError, ValueError)


def test_codes_and_scales_that_do_not_belong_together_are_refused() -> None:
    codes, scale = torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1)
    for bad in (
        scale,
        scale.to(torch.float8_e4m3fn).expand(2, 2),
        scale[:1].to(torch.float8_e4m3fn),
    ):
        with pytest.raises(ShapeError, match="not NVFP4"):
            nvfp4.decode(codes, bad)
        with pytest.raises(ShapeError, match="not NVFP4"):
            nvfp4.decode_exact_products(codes, bad)


def test_other_dtypes_and_unknown_recipes_are_refused() -> None:
    with pytest.raises(ShapeError, match="float64"):
        nvfp4.encode_per_token(torch.ones(1, 16, dtype=torch.float64))
    with pytest.raises(ConfigError, match="300"):
        nvfp4.encode(torch.ones(1, 16), encode_scale=torch.ones(()), recipe=Recipe(300))
    with pytest.raises(ConfigError, match="token factor"):
        nvfp4.fake_quant_per_token(torch.ones(1, 16), factor=1.0, recipe=Recipe())


def test_a_large_weight_is_encoded_as_its_rows_are() -> None:
    """Large inputs are cut into chunks of rows; the seams must not show."""
    weight = torch.randn(3000, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    codes, block_scale, global_scale = nvfp4.encode_weight(weight)
    for rows in (slice(0, 7), slice(1490, 1500), slice(2995, 3000)):
        part, part_scale, _ = nvfp4.encode_weight(weight[rows], amax=amax_of(weight))
        assert torch.equal(part, codes[rows])
        assert torch.equal(raw(part_scale), raw(block_scale[rows]))
    error = nvfp4.decode(codes, block_scale, global_scale=global_scale) - weight.float()
    assert error.square().mean().sqrt() < 0.1 * weight.float().square().mean().sqrt()
