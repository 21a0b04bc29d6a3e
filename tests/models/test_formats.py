# SPDX-License-Identifier: Apache-2.0
"""What a weight is follows from its parts: names, shapes and types."""

from __future__ import annotations

import pytest
import torch

from tetrarch.models.faults import Fault
from tetrarch.models.formats import StoredWeight, recognise, split_part
from tetrarch.models.sources import TensorHeader
from tetrarch.numerics.contract import SourceFormat

F8, U8, F32, BF16 = torch.float8_e4m3fn, torch.uint8, torch.float32, torch.bfloat16
E8M0 = torch.float8_e8m0fnu
Header = tuple[tuple[int, ...], torch.dtype]

BLOCK: dict[str, Header] = {"weight": ((200, 300), F8), "weight_scale_inv": ((2, 3), F32)}
TENSOR: dict[str, Header] = {"weight": ((8, 32), F8), "weight_scale": ((), F32)}
MODELOPT: dict[str, Header] = {
    "weight": ((8, 16), U8),
    "weight_scale": ((8, 2), F8),
    "weight_scale_2": ((), F32),
    "input_scale": ((), F32),
}
COMPRESSED: dict[str, Header] = {
    "weight_packed": ((8, 16), U8),
    "weight_scale": ((8, 2), F8),
    "weight_global_scale": ((1,), F32),
}


def _parts(headers: dict[str, Header]) -> dict[str, tuple[str, TensorHeader]]:
    return {
        part: (f"a.{part}", TensorHeader(shape, dtype, "f"))
        for part, (shape, dtype) in headers.items()
    }


@pytest.mark.parametrize(
    ("headers", "form", "shape", "num_bytes"),
    [
        ({"weight": ((4, 6), BF16)}, SourceFormat.BF16, (4, 6), 48),
        ({"weight": ((4, 6), torch.float16)}, SourceFormat.FP16, (4, 6), 48),
        ({"weight": ((5,), F32)}, SourceFormat.FP32, (5,), 20),
        (BLOCK, SourceFormat.FP8_BLOCK, (200, 300), 60_000 + 24),
        (BLOCK | {"weight_scale_inv": ((2, 3), E8M0)}, SourceFormat.FP8_BLOCK, (200, 300), 60_006),
        (TENSOR, SourceFormat.FP8_TENSOR, (8, 32), 260),
        (MODELOPT, SourceFormat.NVFP4_MODELOPT, (8, 32), 128 + 16 + 8),
        (COMPRESSED, SourceFormat.NVFP4_COMPRESSED, (8, 32), 128 + 16 + 4),
    ],
)
def test_every_stored_form_is_told_from_its_parts(
    headers: dict[str, Header], form: SourceFormat, shape: tuple[int, ...], num_bytes: int
) -> None:
    weight = recognise("a.weight", _parts(headers))
    assert isinstance(weight, StoredWeight)
    assert (weight.format, weight.shape, weight.num_bytes) == (form, shape, num_bytes)
    assert set(weight.parts) == set(headers)


@pytest.mark.parametrize(
    ("headers", "fault", "words"),
    [
        ({"weight_scale": ((8, 2), F8)}, Fault.HALF_PAIRED, "without the weight"),
        ({"weight": ((8, 32), F8)}, Fault.HALF_PAIRED, "weight_scale_inv"),
        (
            {k: v for k, v in MODELOPT.items() if k != "weight_scale_2"},
            Fault.HALF_PAIRED,
            "weight_scale_2",
        ),
        ({"weight": ((4, 6), BF16), "weight_scale": ((), F32)}, Fault.HALF_PAIRED, "stray"),
        (BLOCK | {"weight_scale_inv": ((2, 2), F32)}, Fault.MISMATCHED, "(2, 3)"),
        (MODELOPT | {"weight_scale": ((8, 4), F8)}, Fault.MISMATCHED, "(8, 2)"),
        (MODELOPT | {"weight_scale_2": ((2,), F32)}, Fault.MISMATCHED, "one number"),
        (MODELOPT | {"weight": ((8, 12), U8)}, Fault.MISMATCHED, "multiple of 16"),
        (TENSOR | {"weight_scale": ((8, 1), F32)}, Fault.REFUSED, "neither per tensor"),
        (TENSOR | {"weight_scale": ((8, 1), U8)}, Fault.REFUSED, "MXFP8"),
        (TENSOR | {"weight_scale": ((8, 1), E8M0)}, Fault.REFUSED, "MXFP8"),
        (MODELOPT | {"weight_scale": ((8, 1), E8M0)}, Fault.REFUSED, "MXFP4"),
        ({"weight": ((4, 6), torch.int32)}, Fault.REFUSED, "int32"),
        ({"weight": ((4, 6), torch.float8_e5m2)}, Fault.REFUSED, "e5m2"),
    ],
)
def test_what_is_wrong_with_a_weight_is_told_in_words(
    headers: dict[str, Header], fault: Fault, words: str
) -> None:
    wrong = recognise("a.weight", _parts(headers))
    assert isinstance(wrong, tuple)
    assert wrong[0] is fault
    assert wrong[1].startswith("a.weight: ")
    assert words in wrong[1]


def test_mxfp4_blocks_are_refused_by_name() -> None:
    for word in ("gate_up_proj_blocks", "gate_up_proj_scales"):
        wrong = recognise(f"a.{word}", {"weight": (f"a.{word}", TensorHeader((4,), U8, "f"))})
        assert wrong == (Fault.REFUSED, f"a.{word}: MXFP4")


@pytest.mark.parametrize(
    ("name", "weight", "part"),
    [
        ("a.down_proj.weight", "a.down_proj.weight", "weight"),
        ("a.down_proj.weight_scale_2", "a.down_proj.weight", "weight_scale_2"),
        ("a.down_proj.weight_packed", "a.down_proj.weight", "weight_packed"),
        ("a.down_proj.input_global_scale", "a.down_proj.weight", "input_global_scale"),
        ("a.gate.e_score_correction_bias", "a.gate.e_score_correction_bias", "weight"),
    ],
)
def test_a_name_splits_into_weight_and_part(name: str, weight: str, part: str) -> None:
    assert split_part(name) == (weight, part)
