# SPDX-License-Identifier: Apache-2.0
"""What a weight is follows from the parts that are there."""

from __future__ import annotations

import pytest
import torch

from tetrarch.models.faults import Fault
from tetrarch.models.formats import StoredWeight, recognise, split_part
from tetrarch.models.sources import TensorHeader
from tetrarch.numerics.contract import SourceFormat

F = SourceFormat
BF16, FP32, U8 = torch.bfloat16, torch.float32, torch.uint8
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu

Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]
CODES: Parts = {"weight": ((64, 16), U8)}
MODELOPT: Parts = CODES | {"weight_scale": ((64, 2), E4M3), "weight_scale_2": ((), FP32)}
COMPRESSED: Parts = {
    "weight_packed": ((64, 16), U8),
    "weight_scale": ((64, 2), E4M3),
    "weight_global_scale": ((1,), FP32),
}
FP8: Parts = {"weight": ((192, 130), E4M3)}
BLOCK: Parts = FP8 | {"weight_scale_inv": ((2, 2), FP32)}


def look(parts: Parts, name: str = "x.weight") -> StoredWeight | tuple[Fault, str]:
    return recognise(
        name, {part: (f"x.{part}", TensorHeader(*of, "")) for part, of in parts.items()}
    )


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.down_proj.weight", ("a.down_proj.weight", "weight")),
        ("a.down_proj.weight_scale_2", ("a.down_proj.weight", "weight_scale_2")),
        ("a.down_proj.weight_packed", ("a.down_proj.weight", "weight_packed")),
        ("a.down_proj.input_global_scale", ("a.down_proj.weight", "input_global_scale")),
        ("a.q_proj.bias", ("a.q_proj.bias", "weight")),
        ("a.experts.gate_up_proj", ("a.experts.gate_up_proj", "weight")),
        ("a.gate.e_score_correction_bias", ("a.gate.e_score_correction_bias", "weight")),
    ],
)
def test_the_last_word_tells_a_part_from_its_weight(name: str, split: tuple[str, str]) -> None:
    assert split_part(name) == split


@pytest.mark.parametrize(
    ("parts", "form", "shape"),
    [
        ({"weight": ((7, 3, 5), BF16)}, F.BF16, (7, 3, 5)),
        ({"weight": ((7,), torch.float16)}, F.FP16, (7,)),
        ({"weight": ((), FP32)}, F.FP32, ()),
        (MODELOPT, F.NVFP4_MODELOPT, (64, 32)),
        (MODELOPT | {"input_scale": ((), FP32)}, F.NVFP4_MODELOPT, (64, 32)),
        (COMPRESSED, F.NVFP4_COMPRESSED, (64, 32)),
        (COMPRESSED | {"input_global_scale": ((1,), FP32)}, F.NVFP4_COMPRESSED, (64, 32)),
        (BLOCK, F.FP8_BLOCK, (192, 130)),
        (FP8 | {"weight_scale_inv": ((2, 2), E8M0)}, F.FP8_BLOCK, (192, 130)),
        (FP8 | {"weight_scale": ((), FP32)}, F.FP8_TENSOR, (192, 130)),
        (FP8 | {"weight_scale": ((1,), FP32), "input_scale": ((), FP32)}, F.FP8_TENSOR, (192, 130)),
    ],
)
def test_every_format_is_recognised(
    parts: Parts, form: SourceFormat, shape: tuple[int, ...]
) -> None:
    weight = look(parts)
    assert isinstance(weight, StoredWeight)
    assert (weight.format, weight.shape) == (form, shape)
    assert weight.parts == {part: f"x.{part}" for part in parts}
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts.values()]
    assert weight.num_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (CODES | {"weight_scale": ((64, 1), U8)}, "MXFP4"),
        ({"weight_packed": ((64, 16), U8), "weight_scale": ((64, 1), E8M0)}, "MXFP4"),
        (FP8 | {"weight_scale": ((192, 5), U8)}, "MXFP8"),
        (FP8 | {"weight_scale_inv": ((192, 5), E8M0)}, "MXFP8"),
        (FP8 | {"weight_scale": ((192, 1), FP32)}, "neither per tensor nor 128x128"),
        ({"weight": ((64, 16), E5M2)}, "float8_e5m2"),
        ({"weight_packed": ((64, 4), torch.int32)}, "int32"),
        ({"weight": ((64, 4), torch.int8)}, "int8"),
    ],
)
def test_formats_that_we_do_not_load_are_refused_by_name(parts: Parts, words: str) -> None:
    found = look(parts)
    assert isinstance(found, tuple)
    assert found[0] is Fault.REFUSED
    assert words in found[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
def test_a_plain_weight_of_a_type_that_no_weight_has_is_told_so(dtype: torch.dtype) -> None:
    found = look({"weight": ((64, 4), dtype)}, name="norm.weight")
    assert found == (Fault.WRONG_TYPE, f"norm.weight: stored as {dtype}")


@pytest.mark.parametrize("suffix", ["blocks", "scales"])
def test_stacked_mxfp4_is_refused_by_name(suffix: str) -> None:
    found = look({"weight": ((8, 64, 2, 16), U8)}, name=f"experts.gate_up_proj_{suffix}")
    assert found == (Fault.REFUSED, f"experts.gate_up_proj_{suffix}: MXFP4")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (CODES, "without its weight_scale and weight_scale_2"),
        (FP8, "without its weight_scale_inv"),
        ({"weight_scale": ((64, 2), E4M3)}, "weight_scale without the weight"),
        ({"weight": ((4, 4), BF16), "weight_scale": ((), FP32)}, "stray weight_scale"),
        (MODELOPT | {"weight_scale_inv": ((1, 1), FP32)}, "stray weight_scale_inv"),
        (COMPRESSED | {"weight": ((64, 32), BF16)}, "stray weight"),
    ],
)
def test_parts_that_do_not_pair_are_named(parts: Parts, words: str) -> None:
    found = look(parts)
    assert isinstance(found, tuple)
    assert found[0] is Fault.HALF_PAIRED
    assert words in found[1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (MODELOPT | {"weight_scale": ((64, 4), E4M3)}, "shape (64, 4), expected (64, 2)"),
        (MODELOPT | {"weight_scale": ((64, 2), FP32)}, "weight_scale is of type torch.float32"),
        (MODELOPT | {"weight_scale_2": ((2,), FP32)}, "expected one number"),
        (MODELOPT | {"weight": ((64, 12), U8)}, "24 columns are not a multiple of 16"),
        (MODELOPT | {"weight": ((2, 64, 16), U8)}, "quantized weights are matrices"),
        (FP8 | {"weight_scale_inv": ((1, 2), FP32)}, "shape (1, 2), expected (2, 2)"),
        (FP8 | {"weight_scale_inv": ((2, 2), torch.float16)}, "of type torch.float16"),
        (COMPRESSED | {"input_global_scale": ((64,), FP32)}, "expected one number"),
    ],
)
def test_parts_of_the_wrong_shape_or_type_are_named(parts: Parts, words: str) -> None:
    found = look(parts)
    assert isinstance(found, tuple)
    assert found[0] is Fault.MISMATCHED
    assert words in found[1]


def test_a_scale_of_awq_is_refused_by_name() -> None:
    header = TensorHeader((64,), torch.bfloat16, "f")
    name = "experts.0.down_proj.pre_quant_scale"
    assert recognise(name, {"weight": (name, header)}) == (
        Fault.REFUSED,
        f"{name}: AWQ, whose inputs are scaled per channel",
    )
