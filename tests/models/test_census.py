# SPDX-License-Identifier: Apache-2.0
"""The census knows which experts are there, in words a checkpoint's owner recognises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tetrarch.core.errors import CheckpointError
from tetrarch.models.census import ExpertCensus
from tetrarch.models.names import ExpertDestination
from tetrarch.moe.types import ExpertActivation, ExpertSpec, Part
from tetrarch.numerics.contract import CONTRACTS, Quantization, SourceFormat, contract_for

SPEC = ExpertSpec(
    num_experts=3,
    num_local_experts=2,
    first_local_expert=1,
    top_k=1,
    hidden_size=16,
    intermediate_size=32,
    activation=ExpertActivation(),
    has_bias=False,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
ONLINE = CONTRACTS[0]


def _census(**ignored: Any) -> ExpertCensus:
    layers = cast("Any", {"mlp.experts": SimpleNamespace(spec=SPEC)})
    return ExpertCensus(layers, ignored.get("ignored", ()), ignored.get("contract", ONLINE))


def _to(part: Part | None, expert: int | None, **more: Any) -> ExpertDestination:
    fields = {"bias": False, "transposed": False, "interleaved": False} | more
    return ExpertDestination(layer="mlp.experts", part=part, expert=expert, **fields)


def test_what_is_missing_is_spelled_like_its_neighbours() -> None:
    census = _census()
    for part in Part:
        census.claim(_to(part, 0), f"model.experts.0.{part}_proj.weight")
    census.claim(_to(Part.UP, 2), "model.experts.2.up_proj.weight")
    assert sorted(census.missing()) == [
        "model.experts.1.down_proj.weight",
        "model.experts.1.gate_proj.weight",
        "model.experts.1.up_proj.weight",
        "model.experts.2.down_proj.weight",
        "model.experts.2.gate_proj.weight",
    ]


def test_a_second_claim_returns_the_first() -> None:
    census = _census()
    assert census.claim(_to(Part.UP, 1), "one") is None
    assert census.claim(_to(Part.UP, 1), "two") == "one"
    assert census.claim(_to(None, None), "fused") == "two"


@pytest.mark.parametrize(
    ("to", "shape"),
    [
        (_to(Part.GATE, 0), (32, 16)),
        (_to(Part.DOWN, 0), (16, 32)),
        (_to(None, None), (3, 64, 16)),
        (_to(None, None, transposed=True), (3, 16, 64)),
        (_to(Part.DOWN, None, bias=True), (3, 16)),
    ],
)
def test_shapes_follow_the_geometry(to: ExpertDestination, shape: tuple[int, ...]) -> None:
    assert _census().shape(to) == shape


def test_experts_of_other_ranks_are_not_local() -> None:
    census = _census()
    assert [census.is_local(_to(Part.UP, expert)) for expert in range(3)] == [False, True, True]
    assert census.is_local(_to(None, None))


def test_a_contract_that_cannot_start_from_the_format_names_the_other_one() -> None:
    census = _census()
    census.note_format(_to(Part.UP, 0), SourceFormat.NVFP4_MODELOPT)
    with pytest.raises(CheckpointError, match="modelopt_fp4"):
        census.check_contract()
    serialized = contract_for(Quantization.MODELOPT_FP4)
    assert serialized is not None
    for passes in (_census(contract=serialized), _census(ignored=("mlp.experts",))):
        passes.note_format(_to(Part.UP, 0), SourceFormat.NVFP4_MODELOPT)
        passes.check_contract()
        assert passes.formats() == {"mlp.experts": SourceFormat.NVFP4_MODELOPT}


def test_two_formats_in_one_layer_are_mixed() -> None:
    census = _census()
    census.note_format(_to(Part.UP, 0), SourceFormat.BF16)
    census.note_format(_to(Part.UP, 1), SourceFormat.FP8_BLOCK)
    census.note_format(_to(Part.UP, 2), SourceFormat.BF16)
    assert list(census.mixed()) == ["mlp.experts: mixed, 2 bf16 and 1 fp8_block"]
