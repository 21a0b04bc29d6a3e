# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that does not fit is refused from its headers: named, and nothing was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tetrarch.core.errors import CheckpointError
from tetrarch.models.build import Model, build_model
from tetrarch.models.placement import place
from tetrarch.models.sources import SafetensorsSource, TensorHeader

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
Tensors = dict[str, torch.Tensor]


def _without(name: str) -> Callable[[Tensors], None]:
    def harm(tensors: Tensors) -> None:
        del tensors[name]

    return harm


def _rename(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.2.gate.weight"] = tensors.pop(GATE)


def _reshape(tensors: Tensors) -> None:
    tensors[GATE] = tensors[GATE][:, :-16].contiguous()


def _extra_expert(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.99.gate_proj.weight"] = tensors[GATE].clone()


def _half(tensors: Tensors) -> None:
    tensors[GATE] = tensors[GATE].to(torch.float8_e4m3fn)


def _mxfp4(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"] = torch.zeros(4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("harm", "kind", "named"),
    [
        (_without(GATE), "1 missing", GATE),
        (_without("lm_head.weight"), "1 missing", "lm_head.weight"),
        (_rename, "1 missing, 1 unexpected", "experts.2.gate.weight"),
        (_reshape, "1 mismatched", GATE),
        (_extra_expert, "1 unexpected", "experts.99"),
        (_half, "1 half-paired", "weight_scale_inv"),
        (_mxfp4, "refused", "MXFP4"),
    ],
)
def test_every_fault_is_named_before_anything_is_written(
    lab: Any, tmp_path: Path, harm: Callable[[Tensors], None], kind: str, named: str
) -> None:
    good = lab.tiny("qwen3_moe")
    model, _ = lab.load(good)
    before = lab.bits(model)
    tensors = load_file(good / "model.safetensors")
    harm(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        lab.fill(model, SafetensorsSource(tmp_path), lab.plan(good))
    assert kind in caught.value.what
    assert named in caught.value.why
    assert lab.bits(model) == before


def test_experts_of_two_formats_are_refused_as_mixed(lab: Any, tmp_path: Path) -> None:
    good = lab.tiny("qwen3_moe")
    stored, _ = lab.store(good, "nvfp4_modelopt", which=lab.experts)
    tensors = load_file(stored / "model.safetensors")
    plain = load_file(good / "model.safetensors")
    prefix = GATE.removesuffix("weight")
    tensors = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
    save_file(tensors | {GATE: plain[GATE]}, tmp_path / "model.safetensors")
    model = build_model(lab.plan(good))
    with pytest.raises(CheckpointError, match="refused") as caught:
        lab.fill(model, SafetensorsSource(tmp_path), lab.plan(good))
    assert "mixed" in caught.value.why


class _Headers:
    """A source of headers only: placing must not read."""

    name = "headers"

    def __init__(self, headers: dict[str, TensorHeader]) -> None:
        self.headers = headers

    def read(self, names: object) -> Any:
        pytest.fail("placing read a tensor")


def test_fifty_thousand_names_are_placed_in_seconds(lab: Any) -> None:
    """Measured 1.5 s for a model with 50,000 expert tensors; the bar is 6 s."""
    experts = 2084
    path = lab.tiny("qwen3_moe", num_hidden_layers=8, num_experts=16, hidden_size=32)
    plan = lab.plan(path)
    model: Model = build_model(plan)
    source = SafetensorsSource(path)
    headers = {
        name.replace(".experts.0.", f".experts.{index}."): header
        for name, header in source.headers.items()
        for index in (range(experts) if ".experts.0." in name else (0,))
    }
    assert len(headers) > 50_000
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match="unexpected"):
        place(model, _Headers(headers), plan.quant)  # experts 16 and up do not exist
    assert time.perf_counter() - began < 6
