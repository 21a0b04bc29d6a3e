# SPDX-License-Identifier: Apache-2.0
"""Parts of a weight meet in any order; what comes out decodes, whatever the dialect."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.models.formats import StoredWeight
from tetrarch.models.parts import PartCollector, assemble, decode
from tetrarch.moe.types import Nvfp4Matrix
from tetrarch.numerics.contract import SourceFormat

CPU = torch.device("cpu")
F = SourceFormat


def stored(form: SourceFormat, *parts: str, name: str = "a.weight") -> StoredWeight:
    stem = name.removesuffix("weight")
    return StoredWeight(name, form, (2, 16), {part: f"{stem}{part}" for part in parts}, 0)


def nvfp4_parts(dialect: SourceFormat, scale: float = 0.25) -> dict[str, Tensor]:
    """Codes 1 and 4 (0.5 and 2) under block scale 3."""
    codes = torch.full((2, 8), 1 | 4 << 4, dtype=torch.uint8)
    block_scale = torch.full((2, 1), 3.0).to(torch.float8_e4m3fn)
    if dialect is F.NVFP4_MODELOPT:
        return {"weight": codes, "weight_scale": block_scale, "weight_scale_2": torch.tensor(scale)}
    encode = torch.tensor([1 / scale])
    return {"weight_packed": codes, "weight_scale": block_scale, "weight_global_scale": encode}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_weight_is_whole_when_its_last_part_has_come(order: tuple[int, ...]) -> None:
    a = stored(F.NVFP4_MODELOPT, "weight", "weight_scale", "weight_scale_2")
    b = stored(F.BF16, "weight", name="b.weight")
    names = ["a.weight", "a.weight_scale", "a.weight_scale_2", "b.weight"]
    collector = PartCollector([a, b])
    whole: list[str] = []
    for at, index in enumerate(order):
        taken = collector.add(names[index], torch.tensor(float(index)))
        done = {order[i] for i in range(at + 1)}
        if taken is not None:
            whole.append(taken[0].name)
            if taken[0] is a:
                assert {part: int(value) for part, value in taken[1].items()} == {
                    "weight": 0,
                    "weight_scale": 1,
                    "weight_scale_2": 2,
                }
        assert set(collector.unfinished()) == {
            name
            for name, needs in (("a.weight", {0, 1, 2}), ("b.weight", {3}))
            if not needs <= done
        }
    assert sorted(whole) == ["a.weight", "b.weight"]


@pytest.mark.parametrize("dialect", [F.NVFP4_MODELOPT, F.NVFP4_COMPRESSED])
def test_both_dialects_yield_scales_that_decode(dialect: SourceFormat) -> None:
    parts = nvfp4_parts(dialect)
    inputs = {"input_scale": torch.tensor(0.5)}
    if dialect is F.NVFP4_COMPRESSED:
        inputs = {"input_global_scale": torch.tensor([2.0])}
    whole = assemble(stored(dialect, *parts), parts | inputs, dtype=torch.float32, device=CPU)
    assert isinstance(whole, Nvfp4Matrix)
    assert whole.global_scale.shape == ()
    assert float(whole.global_scale) == 0.25
    assert whole.input_scale is not None
    assert float(whole.input_scale) == 0.5
    assert decode(whole, torch.float32)[0, :2].tolist() == [0.5 * 3 * 0.25, 2 * 3 * 0.25]


@pytest.mark.parametrize("dialect", [F.NVFP4_MODELOPT, F.NVFP4_COMPRESSED])
def test_an_input_scale_is_optional(dialect: SourceFormat) -> None:
    parts = nvfp4_parts(dialect)
    whole = assemble(stored(dialect, *parts), parts, dtype=torch.float32, device=CPU)
    assert isinstance(whole, Nvfp4Matrix)
    assert whole.input_scale is None


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
def test_fp8_is_decoded_to_the_type_asked_for(part: str) -> None:
    codes = torch.full((2, 16), 1.125).to(torch.float8_e4m3fn)
    scale = torch.tensor(1 / 3) if part == "weight_scale" else torch.tensor([[1 / 3]])
    form = F.FP8_TENSOR if part == "weight_scale" else F.FP8_BLOCK
    weight, parts = stored(form, "weight", part), {"weight": codes, part: scale}
    for dtype in (torch.bfloat16, torch.float32):
        value = assemble(weight, parts, dtype=dtype, device=CPU)
        assert isinstance(value, Tensor)
        assert value.dtype == dtype
        assert float(value[1, 5]) == float((torch.tensor(1.125) * torch.tensor(1 / 3)).to(dtype))


def test_a_plain_weight_keeps_its_type_and_its_storage() -> None:
    tensor = torch.ones(2, 16, dtype=torch.float16)
    whole = assemble(stored(F.FP16, "weight"), {"weight": tensor}, dtype=torch.float32, device=CPU)
    assert whole is tensor
    assert decode(whole, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
def test_a_scale_that_is_no_positive_number_is_refused_by_name(part: str, bad: float) -> None:
    parts = nvfp4_parts(F.NVFP4_MODELOPT) | {"input_scale": torch.tensor(1.0)}
    parts[part] = torch.tensor(bad)
    weight = stored(F.NVFP4_MODELOPT, *parts)
    with pytest.raises(CheckpointError, match=f"a.{part}"):
        assemble(weight, parts, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(("bad", "refused"), [(0.0, False), (float("nan"), True), (-1.0, True)])
def test_an_fp8_block_of_zeros_may_have_a_scale_of_zero(bad: float, *, refused: bool) -> None:
    codes = torch.zeros(2, 16).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale_inv": torch.tensor([[bad]])}
    weight = stored(F.FP8_BLOCK, *parts)
    if refused:
        with pytest.raises(CheckpointError, match=r"a\.weight_scale_inv"):
            assemble(weight, parts, dtype=torch.float32, device=CPU)
    else:
        value = assemble(weight, parts, dtype=torch.float32, device=CPU)
        assert isinstance(value, Tensor)
        assert not value.any()
