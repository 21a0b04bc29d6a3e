# SPDX-License-Identifier: Apache-2.0
"""NVFP4 against FlashInfer's and SGLang's bytes (provenance: golden/README.md).

Two things are masked, and each test asserts that exactly they differ: references that lose the
sign of -0 where the kernels keep it, and the token scale of a zero row, where the kernel's is 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.numerics import nvfp4
from tetrarch.numerics.layouts import swizzle_128x4
from tetrarch.numerics.scales import FP32_MAX, amax_of, encode_scale_from_amax
from tolerance import RECIPROCAL_SCALE, assert_close

SETS = ["rand_bf16", "heavy_bf16", "weight_bf16", "hard_bf16", "hard_fp16", "hardgs1_bf16"]
FACTORS = {
    "fi_exact_token": 1 / 2688,
    "fi_exact_token_gsinv1": 1.0,
    "fi_exact_token_256": 1 / 1536,
}


def file_of(golden: Path, name: str) -> dict[str, Tensor]:
    return load_file(golden / f"{name}.safetensors")


def raw(block_scale: Tensor) -> Tensor:
    return block_scale.view(torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


@pytest.mark.parametrize("name", SETS)
def test_encoding_equals_flashinfer_under_a_tensor_scale(golden: Path, name: str) -> None:
    vectors = file_of(golden, f"flashinfer_{name}")
    for key, scale in (
        ("fi_exact_tensor", vectors["gs_encode"]),
        ("fi_exact_tensor_gs1", torch.ones(())),
    ):
        codes, block_scale = nvfp4.encode(vectors["x"], encode_scale=scale)
        assert torch.equal(codes, vectors[f"{key}.packed"])
        assert torch.equal(raw(block_scale), vectors[f"{key}.sf"])


@pytest.mark.parametrize("name", SETS)
def test_the_encode_scale_of_a_tensor_equals_flashinfers(golden: Path, name: str) -> None:
    vectors = file_of(golden, f"flashinfer_{name}")
    encode_scale = encode_scale_from_amax(amax_of(vectors["x"]))
    assert encode_scale.item() == vectors["gs_encode"].item()


@pytest.mark.parametrize("name", SETS)
def test_swizzled_block_scales_equal_flashinfers(golden: Path, name: str) -> None:
    vectors = file_of(golden, f"flashinfer_{name}")
    _, per_tensor = nvfp4.encode(vectors["x"], encode_scale=vectors["gs_encode"])
    _, per_token, _ = nvfp4.encode_per_token(vectors["x"])
    for key, block_scale in (("tensor", per_tensor), ("token", per_token)):
        theirs = vectors[f"fi_exact_{key}.sf_swizzled"]
        assert torch.equal(raw(swizzle_128x4(block_scale)).flatten(), theirs.flatten())


@pytest.mark.parametrize("scope", ["tensor", "token"])
@pytest.mark.parametrize("name", SETS)
def test_the_transformer_engine_reference_differs_only_in_minus_zero(
    golden: Path, name: str, scope: str
) -> None:
    vectors = file_of(golden, f"flashinfer_{name}")
    x = vectors["x"]
    if scope == "tensor":
        codes, block_scale = nvfp4.encode(x, encode_scale=vectors["gs_encode"])
    else:
        codes, block_scale, _ = nvfp4.encode_per_token(x)
    ours, theirs = nibbles(codes), nibbles(vectors[f"fi_te_{scope}.packed"])
    minus_zero = (x == 0) & x.signbit()
    assert torch.equal(ours != theirs, minus_zero)
    assert (ours[minus_zero] == 8).all()
    assert (theirs[minus_zero] == 0).all()
    assert bool(minus_zero.any()) == name.startswith("hard")
    assert torch.equal(raw(block_scale), vectors[f"fi_te_{scope}.sf"])


@pytest.mark.parametrize("name", SETS)
def test_decoding_equals_flashinfer(golden: Path, name: str) -> None:
    vectors = file_of(golden, f"flashinfer_{name}")
    codes = vectors["fi_exact_tensor.packed"]
    block_scale = vectors["fi_exact_tensor.sf"].view(torch.float8_e4m3fn)
    products = nvfp4.decode_exact_products(codes, block_scale, torch.float32)
    quotient = products.double() / vectors["gs_encode"].double()
    assert torch.equal(quotient.float(), vectors["fi_exact_tensor.dequant"])
    decoded = nvfp4.decode(codes, block_scale, global_scale=vectors["gs_encode"].reciprocal())
    assert_close(decoded, vectors["fi_exact_tensor.dequant"], RECIPROCAL_SCALE)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("key", FACTORS)
def test_encoding_per_token_equals_flashinfer(golden: Path, name: str, key: str) -> None:
    vectors = file_of(golden, f"flashinfer_{name}")
    x = vectors["x"]
    codes, block_scale, token_scale = nvfp4.encode_per_token(x, factor=FACTORS[key])
    assert torch.equal(codes, vectors[f"{key}.packed"])
    assert torch.equal(raw(block_scale), vectors[f"{key}.sf"])
    theirs = vectors[f"{key}.per_token_scale"]
    zero_rows = (x == 0).all(dim=1)
    assert torch.equal(token_scale != theirs, zero_rows)
    assert (token_scale[zero_rows] == 0).all()
    assert (theirs[zero_rows] == torch.tensor(FP32_MAX).reciprocal()).all()
    if f"{key}.dequant" in vectors:
        decoded = nvfp4.decode(codes, block_scale, global_scale=token_scale.unsqueeze(1))
        assert torch.equal(decoded, vectors[f"{key}.dequant"])


def test_numbers_that_are_not_finite_follow_flashinfer(golden: Path) -> None:
    vectors = file_of(golden, "nonfinite_bf16")
    codes, block_scale = nvfp4.encode(vectors["x"], encode_scale=torch.tensor(100.0))
    assert torch.equal(codes, vectors["fi_exact_tensor_gs100.packed"])
    assert torch.equal(raw(block_scale), vectors["fi_exact_tensor_gs100.sf"])
    codes, block_scale, token_scale = nvfp4.encode_per_token(vectors["x"])
    assert torch.equal(codes, vectors["fi_exact_token.packed"])
    assert torch.equal(raw(block_scale), vectors["fi_exact_token.sf"])
    assert torch.equal(token_scale, vectors["fi_exact_token.per_token_scale"])


def test_online_weights_equal_sglang(golden: Path) -> None:
    """Gate and up share one largest magnitude, hence one global scale."""
    vectors = file_of(golden, "sglang_online_weights")
    for expert in range(4):
        gate, up, down = (
            vectors[f"{name}_bf16"][expert] for name in ("w1_gate", "w3_up", "w2_down")
        )
        shared = torch.maximum(amax_of(gate), amax_of(up))
        for matrix, amax, rows, name in (
            (gate, shared, slice(0, 64), "w13"),
            (up, shared, slice(64, 128), "w13"),
            (down, None, slice(0, 128), "w2"),
        ):
            codes, block_scale, global_scale = nvfp4.encode_weight(matrix, amax=amax)
            packed = "w13_packed_rows_w1_then_w3" if name == "w13" else "w2_packed"
            assert torch.equal(codes, vectors[packed][expert, rows])
            assert torch.equal(raw(block_scale), vectors[f"{name}_sf_linear"][expert, rows])
            assert torch.equal(global_scale, vectors[f"{name}_weight_scale_2"][expert])
        assert amax_of(gate) != amax_of(up)  # otherwise sharing would not show


def test_a_weight_of_zeros_equals_sglang(golden: Path) -> None:
    vectors = file_of(golden, "sglang_online_weights")
    codes, block_scale, global_scale = nvfp4.encode_weight(torch.zeros(16, 32).bfloat16())
    assert torch.equal(codes, vectors["zero_packed"])
    assert torch.equal(raw(block_scale), vectors["zero_sf"])
    assert torch.equal(global_scale, vectors["zero_weight_scale_2"])


def test_expert_inputs_equal_the_moe_reference(golden: Path) -> None:
    moe = file_of(golden, "moe")
    codes, block_scale, token_scale = nvfp4.encode_per_token(moe["x_bf16"])
    assert torch.equal(codes, moe["x_token.packed"])
    assert torch.equal(raw(block_scale), moe["x_token.sf"])
    assert torch.equal(token_scale, moe["x_token.per_token_scale"])
    scale = moe["x_static.w13_input_scale_quant"]
    codes, block_scale = nvfp4.encode(moe["x_bf16"], encode_scale=scale)
    assert torch.equal(codes, moe["x_static.packed"])
    assert torch.equal(raw(block_scale), moe["x_static.sf"])


@pytest.mark.parametrize(
    "stage",
    ["token_fc2_1over2688", "token_fc2_1.0_sglang_cutedsl", "token_relu2_fc2_1over2688"],
)
def test_second_gemm_inputs_equal_the_moe_reference(golden: Path, stage: str) -> None:
    moe = file_of(golden, "moe")
    factor = moe[f"{stage}.fc2_input_scale"].item()
    codes, block_scale, token_scale = nvfp4.encode_per_token(
        moe[f"{stage}.fc2_in_bf16"], factor=factor
    )
    assert torch.equal(codes, moe[f"{stage}.fc2_in_packed"])
    assert torch.equal(raw(block_scale), moe[f"{stage}.fc2_in_sf"])
    assert torch.equal(token_scale, moe[f"{stage}.fc2_in_per_token_scale"])


def test_static_second_gemm_inputs_equal_the_moe_reference(golden: Path) -> None:
    moe = file_of(golden, "moe")
    scale = moe["static.fc2_input_scale"]
    codes, block_scale = nvfp4.encode(moe["static.fc2_in_bf16"], encode_scale=scale)
    assert torch.equal(codes, moe["static.fc2_in_packed"])
    assert torch.equal(raw(block_scale), moe["static.fc2_in_sf"])
