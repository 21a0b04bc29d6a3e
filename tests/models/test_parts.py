# SPDX-License-Identifier: Apache-2.0
"""Parts become a weight in any order, and scales decode whatever the dialect was."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tetrarch.core.errors import CheckpointError
from tetrarch.models.formats import StoredWeight
from tetrarch.models.parts import PartCollector, assemble, decode
from tetrarch.moe.types import Nvfp4Matrix
from tetrarch.numerics.contract import SourceFormat

CPU = torch.device("cpu")


def _weight(name: str, form: SourceFormat, *words: str) -> StoredWeight:
    return StoredWeight(f"{name}.weight", form, (2, 32), {w: f"{name}.{w}" for w in words}, 0)


MODELOPT = _weight(
    "a", SourceFormat.NVFP4_MODELOPT, "weight", "weight_scale", "weight_scale_2", "input_scale"
)
COMPRESSED = _weight(
    "b",
    SourceFormat.NVFP4_COMPRESSED,
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
)


def _codes() -> torch.Tensor:
    return torch.full((2, 16), 0x72, dtype=torch.uint8)  # 1 and 6, alternating


def _block_scale() -> torch.Tensor:
    return torch.full((2, 2), 3.0).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_weight_leaves_when_its_last_part_arrives(order: tuple[int, ...]) -> None:
    weight = _weight("a", SourceFormat.NVFP4_MODELOPT, "weight", "weight_scale", "weight_scale_2")
    words = list(weight.parts)
    collector = PartCollector([weight])
    for step, at in enumerate(order):
        got = collector.add(f"a.{words[at]}", torch.tensor(float(at)))
        assert (got is not None) == (step == 2)
    assert got is not None
    assert {part: value.item() for part, value in got[1].items()} == {
        word: float(at) for at, word in enumerate(words)
    }
    assert collector.unfinished() == []


def test_what_never_became_whole_is_named() -> None:
    collector = PartCollector([MODELOPT, COMPRESSED])
    assert collector.add("a.weight", _codes()) is None
    assert collector.unfinished() == ["a.weight", "b.weight"]


def test_both_nvfp4_dialects_mean_the_same_numbers() -> None:
    """ModelOpt multiplies by its scales, compressed-tensors divides: 6 * 3 * 0.25 = 4.5."""
    mine = assemble(
        MODELOPT,
        {
            "weight": _codes(),
            "weight_scale": _block_scale(),
            "weight_scale_2": torch.tensor(0.25),
            "input_scale": torch.tensor(0.5),
        },
        dtype=torch.float32,
        device=CPU,
    )
    theirs = assemble(
        COMPRESSED,
        {
            "weight_packed": _codes(),
            "weight_scale": _block_scale(),
            "weight_global_scale": torch.tensor([4.0]),
            "input_global_scale": torch.tensor([2.0]),
        },
        dtype=torch.float32,
        device=CPU,
    )
    assert isinstance(mine, Nvfp4Matrix)
    assert isinstance(theirs, Nvfp4Matrix)
    assert mine.global_scale == theirs.global_scale == 0.25
    assert mine.input_scale == theirs.input_scale == 0.5
    expected = torch.tensor([0.75, 4.5]).repeat(2, 16)
    assert torch.equal(decode(mine, torch.float32), expected)
    assert torch.equal(decode(theirs, torch.bfloat16), expected.bfloat16())


def test_fp8_becomes_values_of_the_dtype_asked_for() -> None:
    codes = torch.full((2, 32), 1.5).to(torch.float8_e4m3fn)
    tensor = _weight("c", SourceFormat.FP8_TENSOR, "weight", "weight_scale")
    block = _weight("d", SourceFormat.FP8_BLOCK, "weight", "weight_scale_inv")
    scale = torch.tensor(0.1)
    for dtype in (torch.bfloat16, torch.float32):
        expected = (torch.full((2, 32), 1.5) * scale).to(dtype)
        one = assemble(tensor, {"weight": codes, "weight_scale": scale}, dtype=dtype, device=CPU)
        parts = {"weight": codes, "weight_scale_inv": scale.reshape(1, 1)}
        other = assemble(block, parts, dtype=dtype, device=CPU)
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, expected)
        assert torch.equal(other, expected)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_would_make_nan_is_refused_by_name(bad: float) -> None:
    parts = {
        "weight": _codes(),
        "weight_scale": _block_scale(),
        "weight_scale_2": torch.tensor(bad),
        "input_scale": torch.tensor(1.0),
    }
    with pytest.raises(CheckpointError, match=r"a\.weight_scale_2 is not a positive"):
        assemble(MODELOPT, parts, dtype=torch.float32, device=CPU)
