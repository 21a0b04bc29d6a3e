# SPDX-License-Identifier: Apache-2.0
"""What a contract takes, what it exempts, and that a reload is a first load."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tetrarch.config.cli import read_keywords
from tetrarch.config.launch import plan_launch
from tetrarch.core.errors import CheckpointError
from tetrarch.models.build import build_model
from tetrarch.models.describe import describe
from tetrarch.models.sources import SafetensorsSource, TensorSource
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import (
    CONTRACTS,
    Activations,
    QuantContract,
    Quantization,
    SourceFormat,
)
from tetrarch.numerics.scales import amax_of

ONLINE: dict[str, Any] = {"quantization": Quantization.NVFP4_ONLINE, "decoded_cache": False}
SERIALIZED = {"quantization": Quantization.MODELOPT_FP4, "activations": Activations.PER_TOKEN}


@pytest.mark.parametrize("form", ["fp8_block", "fp8_tensor"])
def test_fp8_sources_are_quantized_from_their_bf16_values(lab: Any, form: str) -> None:
    path, values = lab.store(lab.ragged("qwen3_moe"), form, lab.experts)
    model, _ = lab.load(path, **ONLINE)
    online = lab.bits(model)
    rounded = {
        name: value.bfloat16() if lab.experts(name) else value for name, value in values.items()
    }
    lab.fill(model, TensorSource(rounded), lab.plan(path, **ONLINE))
    assert lab.bits(model) == online


@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16", "fp8_block", "fp8_tensor"])
@pytest.mark.parametrize(
    "contract",
    [c for c in CONTRACTS if c.quantizes_weights and SourceFormat.BF16 in c.sources],
    ids=lambda contract: contract.name,
)
def test_every_contract_that_quantizes_while_loading_does_it_alike(
    lab: Any, contract: QuantContract, form: str
) -> None:
    """By the definition, from the source's own values; FP8 stands for its BF16 values."""
    path, layer = lab.ragged("qwen3_moe"), "model.layers.1.mlp.experts"
    values = load_file(path / "model.safetensors")
    if form != "fp32":
        path, values = lab.store(path, form, lab.experts)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(form, torch.bfloat16)
    model, report = lab.load(
        path,
        quantization=contract.quantization,
        activations=contract.activations,
        decoded_cache=False,
    )
    assert report.formats[layer] == form
    weights = model.experts[layer].weights
    for expert in range(4):
        gate, up, down = (
            values[f"{layer}.{expert}.{part}_proj.weight"].to(dtype)
            for part in ("gate", "up", "down")
        )
        shared = torch.maximum(amax_of(gate), amax_of(up))
        codes, block_scale, scale = nvfp4.encode_weight(torch.cat((gate, up)), amax=shared)
        assert torch.equal(weights["gate_up"][expert], codes)
        assert torch.equal(weights["gate_up_block_scale"][expert].float(), block_scale.float())
        assert (weights["gate_up_scale"][expert] == scale).all()
        codes, block_scale, scale = nvfp4.encode_weight(down)
        assert torch.equal(weights["down"][expert], codes)
        assert torch.equal(weights["down_block_scale"][expert].float(), block_scale.float())
        assert (weights["down_scale"][expert] == scale).all()


def test_a_checkpoints_own_exclusions_do_not_exempt_its_experts(lab: Any) -> None:
    """Layer 0 is left out of an FP8 checkpoint, as its exclusion list says; online it is NVFP4."""
    excluded, other = (f"model.layers.{layer}.mlp.experts" for layer in range(2))
    path, values = lab.store(
        lab.ragged("qwen3_moe"),
        "fp8_block",
        lambda name: lab.experts(name) and not name.startswith(excluded),
    )
    model, report = lab.load(path, **ONLINE)
    assert report.formats == {excluded: "fp32", other: "fp8_block"}
    assert {layer.weights["gate_up"].dtype for layer in model.experts.values()} == {torch.uint8}

    # Only --fp4-ignored-layers does; the layer then runs in BF16, decoded from FP8.
    model, _ = lab.load(path, **ONLINE, ignored_layers=("model.layers.1.mlp",), dtype="bfloat16")
    assert model.experts[excluded].weights["gate_up"].dtype == torch.uint8
    want = torch.stack([values[f"{other}.{expert}.down_proj.weight"] for expert in range(4)])
    assert torch.equal(model.experts[other].weights["down"], want.bfloat16())
    # Of the model's dtype, whatever that is: no detour through BF16, as the quantized layers take.
    model, _ = lab.load(path, **ONLINE, ignored_layers=("model.layers.1.mlp",))
    assert torch.equal(model.experts[other].weights["down"], want)


@pytest.mark.parametrize(
    ("said", "exempt"),
    [
        ({"quantization": "nvfp4_online"}, []),
        ({"quantization": "nvfp4_online", "fp4_ignored_layers": ("model.layers.1",)}, [1]),
        ({"quantization": "modelopt_fp4"}, [0]),  # the control: here the list counts
    ],
)
def test_a_list_in_config_json_reaches_no_expert_online(
    lab: Any, said: dict[str, Any], exempt: list[int]
) -> None:
    """The same from what an operator types to the bytes of a layer; the list names layer 0."""

    def quantized(name: str) -> bool:
        return lab.experts(name) and ".layers.0." not in name

    path, _ = lab.store(lab.ragged("qwen3_moe"), "fp8_block", quantized)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.mlp", "lm_head"]
    (path / "config.json").write_text(json.dumps(config))
    reading = read_keywords({"model": path, "device": "cpu", "dtype": "bfloat16", **said}, {})
    plan = plan_launch(reading, describe=describe)
    model = build_model(plan)
    lab.fill(model, SafetensorsSource(path), plan)
    kinds = [layer.weights["gate_up"].dtype for layer in model.experts.values()]
    assert [index for index, kind in enumerate(kinds) if kind != torch.uint8] == exempt
    assert {kinds[index] for index in exempt} <= {torch.bfloat16}


def test_a_serialized_layer_that_is_ignored_is_decoded(lab: Any) -> None:
    path, values = lab.store(lab.ragged("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    model, _ = lab.load(path, **SERIALIZED, ignored_layers=("*.1.mlp.experts",))
    stem = "model.layers.1.mlp.experts"
    want = torch.stack([values[f"{stem}.{expert}.down_proj.weight"] for expert in range(4)])
    assert torch.equal(model.experts[stem].weights["down"], want)


@pytest.mark.parametrize(
    ("form", "contract", "fix"),
    [
        ("nvfp4_modelopt", ONLINE, "--quantization modelopt_fp4"),
        ("nvfp4_compressed", {}, "--quantization modelopt_fp4"),
        ("bf16", SERIALIZED, "--quantization nvfp4_online"),
    ],
)
def test_a_contract_refuses_sources_it_does_not_take(
    lab: Any, form: str, contract: dict[str, Any], fix: str
) -> None:
    path, _ = lab.store(lab.ragged("qwen3_moe"), form)
    with pytest.raises(CheckpointError) as caught:
        lab.load(path, **contract)
    assert caught.value.fix == fix
    assert "model.layers.0.mlp.experts" in caught.value.why


@pytest.mark.parametrize("contract", [{}, ONLINE], ids=["none", "nvfp4_online"])
def test_a_reload_keeps_every_address_and_leaves_nothing_behind(
    lab: Any, contract: dict[str, Any]
) -> None:
    """First a, then b, then a again: the bytes are those of a fresh load each time."""
    a, b = (lab.tiny("qwen3_moe", seed=seed, num_hidden_layers=2) for seed in (0, 1))
    model, _ = lab.load(a, **contract)
    fresh = {path: lab.bits(lab.load(path, **contract)[0]) for path in (a, b)}
    tables = [model.weights, *(layer.weights for layer in model.experts.values())]
    before = [table.addresses() for table in tables]
    assert lab.bits(model) == fresh[a] != fresh[b]
    for path in (b, a):
        lab.fill(model, SafetensorsSource(path), lab.plan(a, **contract))
        assert lab.bits(model) == fresh[path]
    assert [table.addresses() for table in tables] == before
