# SPDX-License-Identifier: Apache-2.0
"""A writer writes what is whole, knows what is not, and can say what it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model, build_model
from tetrarch.models.placement import Placement, place
from tetrarch.models.readback import checksums
from tetrarch.models.sources import TensorSource
from tetrarch.models.writer import WeightWriter
from tetrarch.numerics.contract import Quantization, SourceFormat

ONLINE: dict[str, Any] = {"quantization": Quantization.NVFP4_ONLINE, "source": SourceFormat.FP32}
LAYER = "model.layers.1.mlp.experts"


@pytest.fixture
def work(lab: Any) -> tuple[Model, Any, list[tuple[Placement, dict[str, Tensor]]]]:
    """An empty model, its plan, and every weight of a checkpoint with its place."""
    path = lab.tiny("qwen3_moe")
    plan = lab.plan(path, **ONLINE)
    model = build_model(plan)
    tensors = load_file(path / "model.safetensors")
    placed = place(model, TensorSource(tensors), plan.quant).weights
    return model, plan, [(one, {"weight": tensors[one.weight.name]}) for one in placed]


def of_layer(work: Any, layer: str) -> Iterator[tuple[Placement, dict[str, Tensor]]]:
    return ((one, parts) for one, parts in work[2] if one.weight.name.startswith(layer))


def test_a_dense_weight_is_written_at_once_and_a_layer_with_its_last_matrix(work: Any) -> None:
    model, plan, everything = work
    journal = Journal(keeps=True)
    writer = WeightWriter(model, plan.quant, journal)
    norm, parts = next(pair for pair in everything if pair[0].weight.name == "model.norm.weight")
    writer.take(norm.weight, norm.to, parts)
    assert torch.equal(model.weights["model.norm.weight"], parts["weight"])
    kept = journal.num_kept_bytes
    matrices = list(of_layer(work, LAYER))
    for one, parts in matrices[:-1]:
        writer.take(one.weight, one.to, parts)
    assert journal.num_kept_bytes == kept  # nothing of the layer yet
    assert writer.unfinished() == [f"{LAYER}: up of expert 7"]
    assert LAYER in writer.unwritten()
    one, parts = matrices[-1]
    writer.take(one.weight, one.to, parts)
    assert journal.num_kept_bytes - kept == model.experts[LAYER].weights.num_bytes
    assert writer.unfinished() == []
    assert LAYER not in writer.unwritten()
    assert (writer.num_dense, writer.num_expert_matrices) == (1, len(matrices))


def test_what_is_staged_is_written_later(work: Any) -> None:
    model, plan, everything = work
    journal = Journal(keeps=False)
    writer = WeightWriter(model, plan.quant, journal, digests=True)
    for one, parts in everything:
        writer.stage(one.weight, one.to, parts)
    assert journal.is_empty
    assert set(writer.unwritten()) == {*model.weights, *model.experts}
    assert writer.unfinished() == []
    writer.commit()
    assert writer.unwritten() == []
    assert checksums(model) == writer.digests
    writer.commit()  # nothing is left


def test_what_has_not_been_written_is_named(work: Any) -> None:
    model, plan, everything = work
    writer = WeightWriter(model, plan.quant, Journal(keeps=False))
    assert set(writer.unwritten()) == {*model.weights, *model.experts}
    for one, parts in everything:
        writer.take(one.weight, one.to, parts)
    assert writer.unwritten() == []


def test_digests_are_those_of_the_model_and_only_on_demand(work: Any) -> None:
    model, plan, everything = work
    told, silent = (
        WeightWriter(model, plan.quant, Journal(keeps=False), digests=wanted)
        for wanted in (True, False)
    )
    for writer in (told, silent):
        for one, parts in everything:
            writer.take(one.weight, one.to, parts)
    assert told.digests == checksums(model)
    assert silent.digests == {}


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, 1e39])
def test_a_dense_weight_that_is_not_finite_is_refused_by_name_and_not_written(
    work: Any, bad: float
) -> None:
    model, plan, everything = work
    one, parts = next(pair for pair in everything if pair[0].weight.name == "model.norm.weight")
    value = parts["weight"].double()  # 1e39 is a number there, and none in the model's float32
    value[3] = bad
    journal = Journal(keeps=True)
    writer = WeightWriter(model, plan.quant, journal)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN or Inf"):
        writer.take(one.weight, one.to, {"weight": value})
    assert journal.is_empty
    writer.take(one.weight, one.to, parts)  # the number is at fault, not the weight
