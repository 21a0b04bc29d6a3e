# SPDX-License-Identifier: Apache-2.0
"""All experts of all ranks are counted, however they are stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tetrarch.core.errors import CheckpointError
from tetrarch.models.census import ExpertCensus
from tetrarch.models.destinations import ExpertDestination
from tetrarch.moe.types import ExpertActivation, ExpertSpec, Part
from tetrarch.numerics.contract import Quantization, SourceFormat, contract_for

A, B = "layers.0.experts", "layers.1.experts"


def census(
    quantization: Quantization = Quantization.MODELOPT_FP4,
    *,
    bias: bool = False,
    gated: bool = True,
    ignored: tuple[str, ...] = (),
) -> ExpertCensus:
    """Two layers of four experts of 32 x 16 and 16 x 32; this rank owns the last two."""
    spec = ExpertSpec(
        num_experts=4,
        num_local_experts=2,
        first_local_expert=2,
        top_k=2,
        hidden_size=16,
        intermediate_size=32,
        activation=ExpertActivation(gated=gated),
        has_bias=bias,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    layers: Any = {path: SimpleNamespace(spec=spec) for path in (A, B)}
    contract = contract_for(quantization)
    assert contract is not None
    return ExpertCensus(layers, {path: contract for path in (A, B) if path not in ignored})


def one(layer: str, part: Part | None, expert: int | None, **how: bool) -> ExpertDestination:
    return ExpertDestination(layer=layer, part=part, expert=expert, **how)


def fill(count: ExpertCensus, layer: str, form: SourceFormat) -> None:
    for part in Part:
        for expert in range(4):
            count.claim(one(layer, part, expert), f"m.{layer}.{expert}.{part}.weight")
            count.note_format(one(layer, part, expert), form)


@pytest.mark.parametrize(
    ("to", "shape"),
    [
        (one(A, Part.UP, 0), (32, 16)),
        (one(A, Part.DOWN, 0), (16, 32)),
        (one(A, None, 0), (64, 16)),
        (one(A, None, None), (4, 64, 16)),
        (one(A, None, None, transposed=True), (4, 16, 64)),
        (one(A, Part.DOWN, None, transposed=True), (4, 32, 16)),
        (one(A, None, None, bias=True), (4, 64)),
        (one(A, Part.DOWN, 1, bias=True), (16,)),
    ],
)
def test_shapes_follow_from_the_destination(to: ExpertDestination, shape: tuple[int, ...]) -> None:
    assert census(bias=True).shape(to) == shape


def test_a_missing_expert_is_spelled_like_its_neighbours() -> None:
    count = census()
    fill(count, A, SourceFormat.BF16)
    for expert in (0, 1, 3):
        count.claim(one(B, Part.UP, expert), f"model.layers.1.moe.experts.{expert}.w3.weight")
    names = list(count.missing())
    assert "model.layers.1.moe.experts.2.w3.weight" in names
    assert len(names) == 1 + 2 * 4
    assert f"{B} expert 0 gate" in names, "no neighbour to learn the spelling from"


def test_experts_of_other_ranks_are_missed_too() -> None:
    count = census()
    assert {f"{A} expert {expert} up" for expert in range(4)} <= set(count.missing())
    assert [count.is_local(one(A, Part.UP, expert)) for expert in (0, 1, 2, 3, None)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_one_stack_fills_gate_and_up_of_every_expert_and_no_bias() -> None:
    count = census(bias=True)
    for layer in (A, B):
        assert count.claim(one(layer, None, None), "stack") is None
        assert count.claim(one(layer, Part.DOWN, None), "down") is None
    assert all("bias" in name for name in count.missing())
    assert count.claim(one(A, Part.UP, 3), "again") == "stack"


def test_experts_without_a_gate_miss_none() -> None:
    assert not [name for name in census(gated=False).missing() if "gate" in name]


def test_formats_that_decode_alike_may_differ_between_layers() -> None:
    count = census()
    fill(count, A, SourceFormat.BF16)
    fill(count, B, SourceFormat.FP8_BLOCK)
    assert list(count.mixed()) == []
    count.check_contract()


def test_serialized_layers_stand_beside_no_others_unless_those_are_ignored() -> None:
    for ignored in ((), (A,)):
        count = census(ignored=ignored)
        fill(count, A, SourceFormat.BF16)
        fill(count, B, SourceFormat.NVFP4_MODELOPT)
        assert bool(list(count.mixed())) is not bool(ignored)


def test_a_layer_of_two_formats_is_mixed_even_if_ignored() -> None:
    count = census(ignored=(A,))
    fill(count, A, SourceFormat.BF16)
    count.note_format(one(A, Part.UP, 0), SourceFormat.FP8_TENSOR)
    assert list(count.mixed()) == [f"{A}: mixed, 12 bf16 and 1 fp8_tensor"]


def test_the_contract_names_the_layer_it_cannot_start_from() -> None:
    for ignored in ((), (B,)):
        count = census(Quantization.NVFP4_ONLINE, ignored=ignored)
        fill(count, A, SourceFormat.FP8_TENSOR)
        fill(count, B, SourceFormat.NVFP4_COMPRESSED)
        if ignored:
            count.check_contract()
            continue
        with pytest.raises(CheckpointError, match=B) as caught:
            count.check_contract()
        assert caught.value.fix == "--quantization modelopt_fp4"
