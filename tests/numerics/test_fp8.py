# SPDX-License-Identifier: Apache-2.0
"""FP8 sources against SGLang's decoding and a real ModelOpt export."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.core.errors import ShapeError
from tetrarch.numerics.fp8 import decode_block, decode_tensor, round_to_e4m3
from tolerance import SGLANG_FP8_IN_FP16, assert_close

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def sglang(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "sglang_scales_fp8.safetensors")


def e4m3_value(byte: int) -> Fraction:
    """The format's definition, for bytes 0x00 to 0x7E."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 1 << 9)
    return Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)


def test_every_e4m3_value_rounds_to_itself() -> None:
    values = torch.tensor([float(e4m3_value(byte)) for byte in range(127)])
    assert torch.equal(round_to_e4m3(values).view(torch.uint8), torch.arange(127).byte())


def test_a_tie_between_two_e4m3_values_goes_to_the_even_byte() -> None:
    ties = torch.tensor([float((e4m3_value(b) + e4m3_value(b + 1)) / 2) for b in range(126)])
    even = torch.arange(126) + torch.arange(126) % 2
    assert torch.equal(round_to_e4m3(ties).view(torch.uint8), even.byte())
    above = torch.nextafter(ties, torch.tensor(1e9))
    assert torch.equal(round_to_e4m3(above).view(torch.uint8), torch.arange(1, 127).byte())


def test_rounding_saturates_keeps_nan_and_flushes_what_is_too_small() -> None:
    special = torch.tensor([448.0, 464.0, 465.0, math.inf, math.nan, 2.0**-10, 2.0**-9])
    assert round_to_e4m3(special).view(torch.uint8).tolist() == [126, 126, 126, 126, 127, 0, 1]


def test_a_block_weight_decodes_as_sglang_decodes_it(sglang: dict[str, Tensor]) -> None:
    """192 x 160: the last block is not whole, in either direction."""
    weight = sglang["fp8_block.w"].view(E4M3)
    decoded = decode_block(weight, sglang["fp8_block.scale_inv_128x128"])
    assert torch.equal(decoded, sglang["fp8_block.dequant_bf16"])


def test_other_blocks_and_exponent_only_scales_decode_as_their_product() -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).to(E4M3)
    scale = torch.tensor([[0.5, 2.0], [4.0, 0.25], [1.0, 8.0]])
    expected = weight.float() * scale.repeat_interleave(2, 0).repeat_interleave(4, 1)
    for stored in (scale, scale.bfloat16(), scale.to(torch.float8_e8m0fnu)):
        decoded = decode_block(weight, stored, block=(2, 4), dtype=torch.float32)
        assert torch.equal(decoded, expected)


def test_a_tensor_weight_decodes_as_one_fp32_product(sglang: dict[str, Tensor]) -> None:
    weight, scale = sglang["fp8_tensor.w"].view(E4M3), sglang["fp8_tensor_1dim.scale"]
    expected = sglang["fp8_tensor_1dim.dequant_bf16_cpu"]
    assert torch.equal(decode_tensor(weight, scale), expected)
    assert torch.equal(decode_tensor(weight, scale.reshape(())), expected)


def test_sglang_decodes_a_scale_without_dimension_in_fp16(sglang: dict[str, Tensor]) -> None:
    """The number of dimensions must not matter; theirs is a tolerance."""
    weight, scale = sglang["fp8_tensor.w"].view(E4M3), sglang["fp8_tensor_0dim.scale"]
    ours, theirs = decode_tensor(weight, scale), sglang["fp8_tensor_0dim.dequant_bf16_cpu"]
    assert not torch.equal(ours, theirs)
    assert_close(ours.float(), theirs.float(), SGLANG_FP8_IN_FP16)


def test_a_modelopt_export_decodes_to_its_source(golden: Path) -> None:
    folder = golden / "modelopt_fp8_tiny_moe"
    export = load_file(folder / "model.safetensors")
    source = load_file(folder / "source_bf16.safetensors")
    gate, up = source["model.layers.0.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    down = source["model.layers.0.mlp.experts.down_proj"]
    for expert in range(2):
        for name, matrices in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            prefix = f"model.layers.0.mlp.experts.{expert}.{name}"
            scale = export[f"{prefix}.weight_scale"]
            decoded = decode_tensor(export[f"{prefix}.weight"], scale, torch.float32)
            original = matrices[expert].float()
            # Half a step of E4M3: 2**-4 of the value, 2**-10 scales among the subnormals.
            step = torch.maximum(original.abs() * 2**-4, scale * 2**-10)
            assert ((decoded - original).abs() <= step * 1.001).all()


def test_a_weight_without_rows_decodes_to_none() -> None:
    weight = torch.empty(0, 16, dtype=E4M3)
    assert decode_block(weight, torch.empty(0, 1)).shape == (0, 16)
    assert decode_tensor(weight, torch.ones(())).shape == (0, 16)


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.ones(192, 160).to(E4M3)
    for scale in (torch.ones(2, 1), torch.ones(()), torch.ones(2, 2, dtype=torch.int32)):
        with pytest.raises(ShapeError, match="scale"):
            decode_block(weight, scale)
    with pytest.raises(ShapeError, match="one element"):
        decode_tensor(weight, torch.ones(192))
    with pytest.raises(ShapeError, match="FP8 weight"):
        decode_tensor(torch.ones(16, 16), torch.ones(()))
