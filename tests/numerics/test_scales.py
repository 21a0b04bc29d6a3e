# SPDX-License-Identifier: Apache-2.0
"""Second-level scales against other projects' numbers, and the traps of dividing in torch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.numerics.scales import (
    FP32_MAX,
    TOKEN_FACTOR,
    alpha,
    amax_of,
    divide,
    encode_scale_from_amax,
    global_scale_from_amax,
    token_scales,
)


@pytest.fixture(scope="module")
def sglang(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "sglang_scales_fp8.safetensors")


@pytest.fixture(scope="module")
def amaxes() -> Tensor:
    return torch.rand(5000, generator=torch.Generator().manual_seed(1)) * 100


def test_the_encode_scale_is_one_true_division(sglang: dict[str, Tensor]) -> None:
    amax = sglang["make_global_scale.amax"]
    assert torch.equal(encode_scale_from_amax(amax), sglang["te_encode_448"])
    # FlashInfer's helper rounds twice; that we differ from it shows that the trap is real.
    twice = (encode_scale_from_amax(amax) != sglang["make_global_scale.encode_448"]).float().mean()
    assert 0.1 < twice.item() < 0.5


def test_the_encode_scale_equals_numpy_division(amaxes: Tensor) -> None:
    for factor, top in ((TOKEN_FACTOR, 2688.0), (1 / 1536, 1536.0), (1.0, 1.0)):
        expected = np.float32(top) / amaxes.numpy()
        assert np.array_equal(encode_scale_from_amax(amaxes, factor).numpy(), expected)


def test_dividing_by_a_constant_equals_numpy_division(amaxes: Tensor) -> None:
    for constant in (6.0, 2688.0, 1536.0):
        expected = amaxes.numpy() / np.float32(constant)
        assert np.array_equal(divide(amaxes, constant).numpy(), expected)


def test_extreme_amaxes_have_the_reference_encode_scales(sglang: dict[str, Tensor]) -> None:
    extreme = encode_scale_from_amax(torch.tensor([0.0, 1e-40, math.inf, 2688.0]))
    assert extreme.tolist() == [FP32_MAX, FP32_MAX, 1.0, 1.0]
    assert extreme[0].item() == sglang["make_global_scale.zero"].item()


def test_token_scales_undo_the_encode_scales_and_are_zero_for_zero_rows() -> None:
    row_amax = torch.tensor([[0.0], [3.0], [1e-40], [math.inf], [-1.0]])
    encode_scale, token_scale = token_scales(row_amax, TOKEN_FACTOR)
    assert encode_scale.flatten().tolist() == [FP32_MAX, 896.0, FP32_MAX, 1.0, 1.0]
    expected = [0.0, float(np.float32(1) / np.float32(896)), 1 / FP32_MAX, 1.0, 1.0]
    assert token_scale.flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=0)


def test_a_weight_of_zeros_has_the_scale_one() -> None:
    scales = global_scale_from_amax(torch.tensor([0.0, 2688.0, 1344.0]))
    assert scales.tolist() == [1.0, 1.0, 0.5]
    assert global_scale_from_amax(torch.tensor(1536.0), 256).item() == 1.0


def test_the_amax_of_a_weight_counts_nan_as_zero_and_infinity_as_the_largest_number() -> None:
    weight = torch.tensor([[1.0, -3.0], [2.0, 0.5]], dtype=torch.bfloat16)
    assert amax_of(weight).item() == 3.0
    weight[0, 1] = math.nan
    assert amax_of(weight).item() == 2.0
    weight[1, 1] = -math.inf
    assert amax_of(weight).item() == torch.finfo(torch.bfloat16).max
    weight[0, 1] = 3.0  # and without a NaN beside it
    assert amax_of(weight).item() == torch.finfo(torch.bfloat16).max
    assert amax_of(weight.half()).item() == torch.finfo(torch.float16).max
    assert amax_of(torch.full((2, 2), math.nan)).item() == 0.0
    assert amax_of(torch.empty(0, 16)).item() == 0.0


@pytest.mark.parametrize("case", ["static_1d", "static_2col", "ep_slice"])
def test_static_alphas_divide_by_the_encode_scale(sglang: dict[str, Tensor], case: str) -> None:
    """One input scale for all experts, the largest; what it encodes with is its reciprocal."""
    for gemm, ours in (("used_input_scale", "w13"), ("fc2_input_scale", "w2")):
        raw = sglang[f"{case}.{ours}_input_scale_raw"]
        local = sglang[f"{case}.{ours}_weight_scale_2"].shape[0]
        shared = raw.amax() if ours == "w13" else raw[-local:].amax()  # EP: the last rank
        encode_scale = shared.reciprocal()
        assert encode_scale == sglang[f"{case}.out_{gemm}"]
        global_scale = sglang[f"{case}.{ours}_weight_scale_2"].view(local, -1)[:, 0]
        expected = sglang[f"{case}.out_{'w1' if ours == 'w13' else 'w2'}_alpha"]
        assert torch.equal(alpha(global_scale, encode_scale), expected)


def test_multiplying_by_the_input_scale_would_differ(sglang: dict[str, Tensor]) -> None:
    raw = sglang["static_1d.w13_input_scale_raw"].amax()
    global_scale = sglang["static_1d.w13_weight_scale_2"][:, 0]
    assert not torch.equal(global_scale * raw, sglang["static_1d.out_w1_alpha"])


def test_per_token_alphas_are_the_global_scales(sglang: dict[str, Tensor]) -> None:
    """The token scale carries everything; an alpha is never divided by the token factor."""
    neutral = torch.ones(())
    global_scale = sglang["per_token.w13_weight_scale_2"][:, 0]
    assert torch.equal(alpha(global_scale, neutral), sglang["per_token.out_w1_alpha"])
    global_scale = sglang["per_token.w2_weight_scale_2"]
    assert torch.equal(alpha(global_scale, neutral), sglang["per_token.out_w2_alpha"])
    assert sglang["per_token.out_quantizer_gs_inv"].item() == np.float32(TOKEN_FACTOR)


@pytest.mark.parametrize("case", ["static_1d", "static_2col", "ep_slice", "per_token"])
def test_gate_and_up_have_alphas_of_their_own(sglang: dict[str, Tensor], case: str) -> None:
    """SGLang's TensorRT-LLM runner keeps both columns; its CuTe DSL runner takes the gate's.

    It multiplies by the input scale where we divide by what encodes: one unit in the last place.
    """
    encode_scale = sglang[f"{case}.out_used_input_scale"][0]
    ours = alpha(sglang[f"{case}.w13_weight_scale_2"], encode_scale)
    gate, up = sglang[f"{case}.g1_alphas"], sglang[f"{case}.g1_alphas_up"]
    apart = ours.view(torch.int32) - torch.stack((gate, up), dim=1).view(torch.int32)
    assert apart.abs().max() <= (0 if case == "per_token" else 1)
    if case == "static_2col":  # elsewhere the columns are equal
        assert ((up / gate).min() - 1).item() == pytest.approx(0.25, abs=1e-3)


def test_the_moe_reference_scales_its_first_gemm_alike(golden: Path) -> None:
    moe = load_file(golden / "moe.safetensors")
    static = alpha(moe["w13_weight_scale_2"], moe["x_static.w13_input_scale_quant"])
    assert torch.equal(static, moe["static.w1_alpha"])
    assert torch.equal(moe["w13_weight_scale_2"], moe["token_fc2_1over2688.w1_alpha"])
