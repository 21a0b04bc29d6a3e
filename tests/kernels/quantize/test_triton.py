# SPDX-License-Identifier: Apache-2.0
"""Triton's rows are the definition's, bit for bit, however they are cut into programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.core.errors import ConfigError
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe

kernels: Any = pytest.importorskip(
    "tetrarch.kernels.quantize.triton", reason="pip install tetrarch[test-kernels]"
)

RECIPES = [Recipe(m, e, h) for m in (448, 256) for e in ("mae", "mse") for h in (False, True)]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NaN in numpy
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def wide_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Eight rows a program in the interpreter, which takes 30 ms for each."""
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "tile_shape", lambda *_: (8, 1))


def octets(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def assert_same(mine: Tensor, defined: Tensor) -> None:
    """Equal bits; NaN is NaN."""
    assert torch.equal(mine.isnan(), defined.isnan())
    assert torch.equal(octets(mine.nan_to_num()), octets(defined.nan_to_num()))
    assert torch.equal(mine.signbit() & ~mine.isnan(), defined.signbit() & ~defined.isnan())


def rounded(
    x: Tensor, *, encode_scale: Tensor | None = None, dtype: torch.dtype = BF16, **how: Any
) -> tuple[Tensor, Tensor | None]:
    values = torch.empty_like(x, dtype=dtype)
    token_scale = None if encode_scale is not None else x.new_empty(x.shape[0], dtype=FP32)
    kernels.round_rows(x, values=values, token_scale=token_scale, encode_scale=encode_scale, **how)
    return values, token_scale


def room(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    return codes, x.new_empty((*x.shape[:-1], x.shape[-1] // 16), dtype=torch.float8_e4m3fn)


def encoded(x: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    codes, block_scale = room(x)
    token_scale = x.new_empty(x.shape[0], dtype=FP32)
    kernels.encode_rows_per_token(
        x, codes=codes, block_scale=block_scale, token_scale=token_scale, **how
    )
    return codes, block_scale, token_scale


def hard_rows(golden: Path, device: torch.device) -> Tensor:
    """Midpoints, subnormals, zeros of both signs, the largest numbers; NaN and infinities."""
    names = ("flashinfer_hard_bf16", "nonfinite_bf16")
    return torch.cat([load_file(golden / f"{name}.safetensors")["x"] for name in names]).to(device)


def spread(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows whose magnitudes differ by 2**±10, and elements within a row as well."""
    generator = torch.Generator().manual_seed(rows * width)
    gains = torch.randn(rows, 1, generator=generator) * 3 + torch.randn(
        rows, width // 16, generator=generator
    )
    gains = gains.exp2().repeat_interleave(16, dim=1)
    return (torch.randn(rows, width, generator=generator) * gains).to(dtype)


def shapes(device: torch.device) -> list[tuple[int, int]]:
    small = [(1, 16), (3, 48), (5, 80), (2, 272)]
    return (
        small if device.type == "cpu" else [*small, (7, 2048), (33, 2688), (1500, 768), (9, 7168)]
    )


@pytest.mark.parametrize("name", ["rand_bf16", "hard_bf16", "hard_fp16"])
@pytest.mark.parametrize(
    ("key", "factor"), [("fi_exact_token", 1 / 2688), ("fi_exact_token_gsinv1", 1.0)]
)
@pytest.mark.usefixtures("wide_programs")
def test_rows_have_flashinfers_bytes_under_either_factor(
    golden: Path, device: torch.device, name: str, key: str, factor: float
) -> None:
    vectors = load_file(golden / f"flashinfer_{name}.safetensors", device=str(device))
    codes, block_scale, _ = encoded(vectors["x"], factor=factor)
    assert torch.equal(codes, vectors[f"{key}.packed"])
    assert torch.equal(octets(block_scale), vectors[f"{key}.sf"])


@pytest.mark.parametrize("factor", [1 / 2688, 1 / 1536, 1.0])
@pytest.mark.usefixtures("wide_programs")
def test_hard_rows_are_the_definitions_under_every_factor(
    golden: Path, device: torch.device, factor: float
) -> None:
    x = hard_rows(golden, device)
    values, token_scale = rounded(x, factor=factor)
    defined = nvfp4.fake_quant_per_token(x, factor=factor, dtype=BF16)
    assert_same(values, defined[0])
    assert torch.equal(token_scale, defined[1])


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.usefixtures("wide_programs")
def test_hard_rows_are_the_definitions_under_every_recipe(
    golden: Path, device: torch.device, recipe: Recipe
) -> None:
    x = hard_rows(golden, device)
    how = dict(factor=recipe.token_factor, recipe=recipe)
    defined = nvfp4.encode_per_token(x, **how)
    for mine, theirs in zip(encoded(x, **how), defined, strict=True):
        assert torch.equal(octets(mine), octets(theirs))
    scale = torch.tensor(100.0, device=device)
    values, _ = rounded(x, encode_scale=scale, recipe=recipe)
    assert_same(values, nvfp4.fake_quant(x, encode_scale=scale, recipe=recipe, dtype=BF16))


@pytest.mark.parametrize("scale", [1.0, 3e-5, 1e30, 3e38, 1e-39])
@pytest.mark.usefixtures("wide_programs")
def test_a_static_scale_may_be_as_small_or_large_as_fp32(
    golden: Path, device: torch.device, scale: float
) -> None:
    """At 1e-39 its reciprocal is infinite, at 3e38 a product with it."""
    x, encode_scale = hard_rows(golden, device), torch.tensor(scale, device=device)
    for recipe in (None, WEIGHT_RECIPE):
        codes, block_scale = room(x)
        how = dict(encode_scale=encode_scale, recipe=recipe)
        kernels.encode_rows(x, codes=codes, block_scale=block_scale, **how)
        defined = nvfp4.encode(x, **how)
        assert torch.equal(codes, defined[0])
        assert torch.equal(octets(block_scale), octets(defined[1]))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("recipe", [None, WEIGHT_RECIPE], ids=["plain", "4over6"])
def test_any_width_of_whole_blocks_is_rounded(
    device: torch.device, dtype: torch.dtype, recipe: Recipe | None
) -> None:
    """What lies beside a row in its tile counts for nothing."""
    for rows, width in shapes(device):
        x = spread(rows, width, dtype).to(device)
        values, token_scale = rounded(x, recipe=recipe, dtype=dtype)
        defined = nvfp4.fake_quant_per_token(x, recipe=recipe, dtype=dtype)
        assert_same(values, defined[0])
        assert torch.equal(token_scale, defined[1])
        for mine, theirs in zip(
            encoded(x, recipe=recipe), nvfp4.encode_per_token(x, recipe=recipe), strict=True
        ):
            assert torch.equal(octets(mine), octets(theirs))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (8, 4)])
def test_how_rows_are_cut_into_programs_moves_no_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    x = spread(5, 96, BF16).to(device)
    monkeypatch.setattr(kernels, "tile_shape", lambda *_: shape)
    guarded = torch.full((8, 96), 7.0, dtype=BF16, device=device)
    kernels.round_rows(x, values=guarded[:5], token_scale=torch.empty(5, device=device))
    assert_same(guarded[:5], nvfp4.fake_quant_per_token(x, dtype=BF16)[0])
    assert (guarded[5:] == 7.0).all()


@pytest.mark.usefixtures("wide_programs")
def test_a_stack_of_weights_has_sglangs_bytes(golden: Path, device: torch.device) -> None:
    vectors = load_file(golden / "sglang_online_weights.safetensors", device=str(device))
    gate_up = torch.cat((vectors["w1_gate_bf16"], vectors["w3_up_bf16"]), dim=1)
    want = {
        "w13": ("w13_packed_rows_w1_then_w3", "w13_sf_linear"),
        "w2": ("w2_packed", "w2_sf_linear"),
    }
    for name, weight in (("w13", gate_up[:1]), ("w2", vectors["w2_down_bf16"][:1])):
        codes, block_scale = room(weight)
        global_scale, amax = torch.empty(2, 1, device=device)
        kernels.encode_weights(
            weight.contiguous(),
            codes=codes,
            block_scale=block_scale,
            global_scale=global_scale,
            amax=amax,
        )
        packed, scales = (vectors[key][:1] for key in want[name])
        assert torch.equal(codes, packed)
        assert torch.equal(octets(block_scale), scales)
        assert torch.equal(global_scale, vectors[f"{name}_weight_scale_2"][:1])


@pytest.mark.parametrize("recipe", [None, Recipe(256, "mse")], ids=["plain", "4over6"])
@pytest.mark.usefixtures("wide_programs")
def test_each_weight_of_a_stack_is_encoded_by_itself(
    device: torch.device, recipe: Recipe | None
) -> None:
    """Zeros have the scale 1, NaN counts for nothing, an infinity is the dtype's largest."""
    stack = spread(12, 48, BF16).view(4, 3, 48)
    stack[0] = 0
    stack[1, 0, 0], stack[2, 1, 5] = float("nan"), -float("inf")
    stack = stack.to(device)
    codes, block_scale = room(stack)
    global_scale, amax = torch.empty(2, 4, device=device)
    kernels.encode_weights(
        stack,
        codes=codes,
        block_scale=block_scale,
        global_scale=global_scale,
        amax=amax,
        recipe=recipe,
    )
    for index, weight in enumerate(stack):
        defined = nvfp4.encode_weight(weight, recipe)
        assert torch.equal(codes[index], defined[0])
        assert torch.equal(octets(block_scale[index]), octets(defined[1]))
        assert torch.equal(global_scale[index], defined[2])


def test_each_matrix_is_encoded_under_its_own_given_scale(device: torch.device) -> None:
    stack = spread(6, 32, BF16).view(2, 3, 32).to(device)
    scales = torch.tensor([0.5, 300.0], device=device)
    codes, block_scale = room(stack)
    kernels.encode_rows(stack, codes=codes, block_scale=block_scale, encode_scale=scales)
    for index, weight in enumerate(stack):
        assert torch.equal(codes[index], nvfp4.encode(weight, encode_scale=scales[index])[0])
    assert not torch.equal(codes[1], nvfp4.encode(stack[1], encode_scale=scales[0])[0])


def test_no_rows_are_no_launch(device: torch.device) -> None:
    values, token_scale = rounded(torch.empty(0, 64, dtype=BF16, device=device))
    assert values.shape == (0, 64)
    assert token_scale is not None
    assert token_scale.shape == (0,)


def test_a_recipe_with_another_factor_than_its_own_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="token factor"):
        rounded(torch.zeros(1, 16, device=device), factor=1.0, recipe=WEIGHT_RECIPE)
