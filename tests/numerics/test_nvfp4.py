# SPDX-License-Identifier: Apache-2.0
"""The format, byte for byte, against what other projects' code computed.

Where goldens disagree among themselves the kernel's rule wins: a row of zeros has the token scale
0, and -0 keeps its sign. Those are the only bytes that are masked, and each mask is counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.core.errors import ConfigError, ShapeError
from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.nvfp4 import (
    decode,
    decode_exact_products,
    encode,
    encode_per_token,
    encode_weight,
    fake_quant,
    fake_quant_per_token,
)
from tetrarch.numerics.scales import amax_of

SETS = ("rand_bf16", "weight_bf16", "heavy_bf16", "hard_bf16", "hard_fp16", "hardgs1_bf16")
# Factor that a row's amax is multiplied by, and the golden made with it.
FACTORS = {
    "fi_exact_token": 1 / 2688,
    "fi_exact_token_gsinv1": 1.0,
    "fi_exact_token_256": 1 / 1536,
}


def _golden(golden: Path, name: str) -> dict[str, Tensor]:
    return load_file(golden / f"flashinfer_{name}.safetensors")


def _bytes(block_scale: Tensor) -> Tensor:
    return block_scale.view(torch.uint8)


@pytest.mark.parametrize("name", SETS)
def test_a_tensor_under_one_scale_has_the_kernels_bytes(golden: Path, name: str) -> None:
    vectors = _golden(golden, name)
    codes, block_scale = encode(vectors["x"], encode_scale=vectors["gs_encode"])
    assert torch.equal(codes, vectors["fi_exact_tensor.packed"])
    assert torch.equal(_bytes(block_scale), vectors["fi_exact_tensor.sf"])


@pytest.mark.parametrize("name", SETS)
def test_a_tensor_under_scale_one_has_the_kernels_bytes(golden: Path, name: str) -> None:
    vectors = _golden(golden, name)
    codes, block_scale = encode(vectors["x"], encode_scale=torch.tensor(1.0))
    assert torch.equal(codes, vectors["fi_exact_tensor_gs1.packed"])
    assert torch.equal(_bytes(block_scale), vectors["fi_exact_tensor_gs1.sf"])


@pytest.mark.parametrize("tag", FACTORS)
@pytest.mark.parametrize("name", SETS)
def test_rows_under_their_own_scales_have_the_kernels_bytes(
    golden: Path, name: str, tag: str
) -> None:
    vectors = _golden(golden, name)
    x = vectors["x"]
    codes, block_scale, token_scale = encode_per_token(x, factor=FACTORS[tag])
    assert torch.equal(codes, vectors[f"{tag}.packed"])
    assert torch.equal(_bytes(block_scale), vectors[f"{tag}.sf"])
    zero = (x == 0).all(-1)  # the golden's convention is fl(1 / FP32_MAX), the kernel's is 0
    assert torch.equal(token_scale[~zero], vectors[f"{tag}.per_token_scale"][~zero])
    assert (token_scale[zero] == 0).all()
    assert int(zero.sum()) == {
        "heavy_bf16": 1,
        "hard_bf16": 2,
        "hard_fp16": 2,
        "hardgs1_bf16": 2,
    }.get(name, 0)


@pytest.mark.parametrize("name", SETS)
def test_transformer_engines_reference_agrees_but_for_the_sign_of_zero(
    golden: Path, name: str
) -> None:
    """A second, independent implementation; it loses the sign of -0, which the kernels keep."""
    vectors = _golden(golden, name)
    codes, block_scale = encode(vectors["x"], encode_scale=vectors["gs_encode"])
    assert torch.equal(_bytes(block_scale), vectors["fi_te_tensor.sf"])
    theirs = vectors["fi_te_tensor.packed"]
    for shift in (0, 4):
        mine, other = (codes >> shift) & 15, (theirs >> shift) & 15
        at = slice(shift // 4, None, 2)
        minus_zero = torch.signbit(vectors["x"][:, at]) & (vectors["x"][:, at] == 0)
        differs = mine != other
        assert (differs <= minus_zero).all()
        assert (mine[differs] == 8).all()
        assert (other[differs] == 0).all()


@pytest.mark.parametrize("name", SETS)
def test_decoding_gives_the_reference_values(golden: Path, name: str) -> None:
    vectors = _golden(golden, name)
    codes, block_scale, token_scale = encode_per_token(vectors["x"])
    decoded = decode(codes, block_scale, global_scale=token_scale[:, None])
    assert torch.equal(decoded, vectors["fi_exact_token.dequant"])


def test_what_is_not_finite_follows_the_reference(golden: Path) -> None:
    vectors = load_file(golden / "nonfinite_bf16.safetensors")
    codes, block_scale = encode(vectors["x"], encode_scale=torch.tensor(100.0))
    assert torch.equal(codes, vectors["fi_exact_tensor_gs100.packed"])
    assert torch.equal(_bytes(block_scale), vectors["fi_exact_tensor_gs100.sf"])
    codes, block_scale, token_scale = encode_per_token(vectors["x"])
    assert torch.equal(codes, vectors["fi_exact_token.packed"])
    assert torch.equal(_bytes(block_scale), vectors["fi_exact_token.sf"])
    assert torch.equal(token_scale, vectors["fi_exact_token.per_token_scale"])


def test_online_expert_weights_have_sglangs_bytes(golden: Path) -> None:
    vectors = load_file(golden / "sglang_online_weights.safetensors")
    for expert in range(4):
        gate, up = vectors["w1_gate_bf16"][expert], vectors["w3_up_bf16"][expert]
        shared = torch.maximum(amax_of(gate), amax_of(up))
        halves = [encode_weight(half, amax=shared) for half in (gate, up)]
        packed = torch.cat([codes for codes, _, _ in halves])
        block_scale = torch.cat([_bytes(scale) for _, scale, _ in halves])
        assert torch.equal(packed, vectors["w13_packed_rows_w1_then_w3"][expert])
        assert torch.equal(block_scale, vectors["w13_sf_linear"][expert])
        assert all(scale == vectors["w13_weight_scale_2"][expert] for _, _, scale in halves)
        codes, down_scale, global_scale = encode_weight(vectors["w2_down_bf16"][expert])
        assert torch.equal(codes, vectors["w2_packed"][expert])
        assert torch.equal(_bytes(down_scale), vectors["w2_sf_linear"][expert])
        assert global_scale == vectors["w2_weight_scale_2"][expert]


def test_a_weight_of_zeros_has_scale_one(golden: Path) -> None:
    vectors = load_file(golden / "sglang_online_weights.safetensors")
    codes, block_scale, global_scale = encode_weight(torch.zeros(16, 32))
    assert torch.equal(codes, vectors["zero_packed"])
    assert torch.equal(_bytes(block_scale), vectors["zero_sf"])
    assert global_scale == vectors["zero_weight_scale_2"] == 1.0


@pytest.mark.parametrize("recipe", [None, Recipe(448, "mse", half_error=True)])
@pytest.mark.parametrize("factor", [1 / 2688, 1.0])
def test_fake_quantization_is_encoding_without_the_bytes(
    golden: Path, recipe: Recipe | None, factor: float
) -> None:
    if recipe is not None and factor == 1.0:
        with pytest.raises(ConfigError, match="token factor"):
            fake_quant_per_token(torch.ones(1, 16), factor=factor, recipe=recipe)
        return
    x = _golden(golden, "heavy_bf16")["x"]
    products, token_scale = fake_quant_per_token(x, factor=factor, recipe=recipe)
    codes, block_scale, expected_scale = encode_per_token(x, factor=factor, recipe=recipe)
    expected = decode_exact_products(codes, block_scale, torch.float32)
    assert torch.equal(products, expected)
    assert torch.equal(token_scale, expected_scale)
    scale = torch.tensor(37.5)
    static = decode_exact_products(*encode(x, encode_scale=scale, recipe=recipe), torch.float32)
    assert torch.equal(fake_quant(x, encode_scale=scale, recipe=recipe), static)


def test_a_loud_row_changes_no_other_row_under_per_token() -> None:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    loud = x.clone()
    loud[3] *= 1000
    others = [row for row in range(8) if row != 3]
    for before, after in zip(encode_per_token(x), encode_per_token(loud), strict=True):
        mine, theirs = before[others], after[others]
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    # The control: one dynamic scale for the whole tensor makes the neighbours pay.
    whole = [encode(each, encode_scale=2688 / amax_of(each)) for each in (x, loud)]
    assert not torch.equal(whole[0][0][others], whole[1][0][others])


def test_every_code_times_every_block_scale_is_exact_in_bf16_and_fp16() -> None:
    """All 16 codes with all 127 finite scales: 2032 products, and their negatives among them."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    codes = codes.expand(127, 8).contiguous()
    exact = decode_exact_products(codes, scales[:, None], torch.float32).double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    signed = torch.cat([values, -values])
    assert torch.equal(exact, scales.double()[:, None] * signed)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(decode_exact_products(codes, scales[:, None], dtype).double(), exact)


def test_encoding_what_was_decoded_changes_nothing() -> None:
    """Values that NVFP4 holds exactly survive, if the block's largest is a 6."""
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(5))
    scale = torch.tensor(2688.0) / amax_of(x)
    codes, block_scale = encode(x, encode_scale=scale)
    decoded = decode(codes, block_scale, global_scale=scale.reciprocal())
    again, scale_again = encode(decoded, encode_scale=scale)
    largest = decode(codes, torch.ones_like(block_scale.float()).to(torch.float8_e4m3fn))
    full = largest.unflatten(-1, (-1, 16)).abs().amax(-1) == 6
    assert full.float().mean() > 0.9
    kept = full.repeat_interleave(8, dim=-1)
    assert torch.equal(again[kept], codes[kept])
    assert torch.equal(_bytes(scale_again)[full], _bytes(block_scale)[full])


def test_nothing_is_encoded_to_nothing() -> None:
    codes, block_scale, token_scale = encode_per_token(torch.empty(0, 64))
    assert (codes.shape, block_scale.shape, token_scale.shape) == ((0, 32), (0, 4), (0,))
    assert decode(codes, block_scale).shape == (0, 64)


@pytest.mark.parametrize("shape", [(2, 24), (2, 0), ()])
def test_what_has_no_sixteen_neighbours_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="16"):
        encode(torch.ones(shape), encode_scale=torch.tensor(1.0))


def test_other_dtypes_and_unknown_recipes_are_refused() -> None:
    with pytest.raises(ShapeError, match="float64"):
        encode_per_token(torch.ones(1, 16, dtype=torch.float64))
    with pytest.raises(ConfigError, match="300"):
        encode(torch.ones(1, 16), encode_scale=torch.tensor(1.0), recipe=Recipe(300))
    with pytest.raises(ShapeError, match="not NVFP4"):
        decode(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 2).to(torch.float8_e4m3fn))


def test_a_large_weight_is_encoded_as_its_rows_are() -> None:
    """Large inputs are cut into chunks of rows; the seams must not show."""
    x = torch.randn(3000, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    codes, block_scale, global_scale = encode_weight(x)
    for rows in (slice(0, 7), slice(1490, 1500), slice(2995, 3000)):
        part, part_scale, _ = encode_weight(x[rows], amax=amax_of(x))
        assert torch.equal(part, codes[rows])
        assert torch.equal(_bytes(part_scale), _bytes(block_scale[rows]))
    error = decode(codes, block_scale, global_scale=global_scale) - x.float()
    assert error.square().mean().sqrt() < 0.1 * x.float().square().mean().sqrt()
