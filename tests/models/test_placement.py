# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that does not fit is refused from its headers, by name, and nothing is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from tetrarch.core.errors import CheckpointError
from tetrarch.models import placement
from tetrarch.models.build import Model, build_model
from tetrarch.models.destinations import DenseDestination, Destination, ExpertDestination
from tetrarch.models.placement import Placer, place
from tetrarch.models.report import Unused
from tetrarch.models.sources import TensorHeader, TensorSource, reading_order
from tetrarch.numerics.contract import Activations, Quantization

Tensors = dict[str, Tensor]
LAYER = "model.layers.1.mlp.experts"
UP = f"{LAYER}.2.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def model(lab: Any) -> Model:
    """Two layers of four experts, in FP32, loaded."""
    return lab.load(lab.ragged("qwen3_moe"))[0]


@pytest.fixture(scope="module")
def stored(lab: Any) -> Callable[[str], Tensors]:
    """The model's checkpoint in some form."""

    def load(form: str) -> Tensors:
        path = lab.ragged("qwen3_moe")
        if form != "fp32":
            path, _ = lab.store(path, form, lab.experts)
        return load_file(path / "model.safetensors")

    return load


def without(tensors: Tensors, name: str) -> None:
    del tensors[name]


def rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def stack(tensors: Tensors) -> None:
    tensors[f"{LAYER}.gate_up_proj"] = torch.zeros(4, 320, 144)


def mxfp4(tensors: Tensors) -> None:
    tensors[f"{LAYER}.gate_up_proj_blocks"] = torch.zeros(4, 288, 4, 16, dtype=torch.uint8)
    tensors[f"{LAYER}.gate_up_proj_scales"] = torch.zeros(4, 288, 4, dtype=torch.uint8)


def mxfp8(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    tensors[f"{UP}_scale"] = torch.zeros(160, 5, dtype=torch.uint8)


def only_mxfp4(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(LAYER)]:
        rows, columns = tensors.pop(name).shape
        tensors[f"{name}_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{name}_scale"] = torch.zeros(rows, columns // 32, dtype=torch.uint8)


def half(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].bfloat16()


def narrow(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP][:, :128].contiguous()


CASES: dict[str, tuple[str, Callable[[Tensors], object], list[str]]] = {
    "an expert is missing": ("fp32", lambda t: without(t, UP), ["1 missing", UP]),
    "a norm is missing": ("fp32", lambda t: without(t, NORM), ["1 missing", NORM]),
    "an expert has another name": (
        "fp32",
        lambda t: rename(t, UP, UP.replace("up", "upper")),
        ["1 missing, 1 unexpected", UP, UP.replace("up", "upper")],
    ),
    "an expert too many": (
        "fp32",
        lambda t: t.update({UP.replace(".2.", ".4."): t[UP]}),
        ["1 unexpected", UP.replace(".2.", ".4.")],
    ),
    "a matrix is narrower": ("fp32", narrow, ["1 mismatched", UP, "(160, 128)", "(160, 144)"]),
    "a norm is longer": (
        "fp32",
        lambda t: t.update({NORM: torch.ones(160)}),
        ["1 mismatched", NORM, "(160,)", "(144,)"],
    ),
    "codes are narrower": (
        "nvfp4_modelopt",
        lambda t: t.update({UP: t[UP][:, :64].contiguous()}),
        ["1 mismatched", UP, "weight_scale is of shape (160, 9), expected (160, 8)"],
    ),
    "ModelOpt codes without the global scale": (
        "nvfp4_modelopt",
        lambda t: without(t, f"{UP}_scale_2"),
        ["1 half-paired", UP, "without its weight_scale_2"],
    ),
    "compressed codes without block scales": (
        "nvfp4_compressed",
        lambda t: without(t, f"{UP}_scale"),
        ["1 half-paired", UP, "without its weight_scale"],
    ),
    "scales without codes": (
        "nvfp4_compressed",
        lambda t: without(t, f"{UP}_packed"),
        ["1 half-paired", UP, "without the weight"],
    ),
    "FP8 without its scale": (
        "fp8_block",
        lambda t: without(t, f"{UP}_scale_inv"),
        ["1 half-paired", UP, "without its weight_scale_inv"],
    ),
    "a plain weight with a scale": (
        "fp32",
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 2)}),
        ["1 half-paired", UP, "stray weight_scale_inv"],
    ),
    "experts also stacked": ("fp32", stack, ["given twice", f"{LAYER}.gate_up_proj"]),
    "MXFP4": ("fp32", mxfp4, ["2 refused", "MXFP4", f"{LAYER}.gate_up_proj_blocks"]),
    "MXFP8": ("fp32", mxfp8, ["model: 1 refused\n", "MXFP8", UP]),
    "a matrix of whole numbers": (
        "fp32",
        lambda t: t.update({UP: t[UP].int()}),
        ["model: 1 of a wrong type\n", UP, "int32"],
    ),
    "a norm of whole numbers": (
        "fp32",
        lambda t: t.update({NORM: t[NORM].int()}),
        ["model: 1 of a wrong type\n", NORM, "int32", "BF16, FP16 or FP32"],
    ),
    "all of a layer's experts are MXFP4": (
        "fp32",
        lambda t: only_mxfp4(t),
        ["model: 12 refused\n", "MXFP4", "E8M0"],
    ),
    "one matrix in another format": (
        "fp32",
        half,
        ["1 refused", f"{LAYER}: mixed, 1 bf16 and 11 fp32"],
    ),
    "one layer is not NVFP4": (
        "nvfp4_modelopt",
        lambda t: plain_layer(t),
        ["1 refused", "mixed, 1 bf16 and 1 nvfp4_modelopt", "--fp4-ignored-layers"],
    ),
}


def plain_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(LAYER)]:
        value = tensors.pop(name)
        if name.endswith(".weight"):
            tensors[name] = torch.zeros(value.shape[0], 2 * value.shape[1]).bfloat16()


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    lab: Any, model: Model, stored: Callable[[str], Tensors], case: str
) -> None:
    form, damage, words = CASES[case]
    tensors, before = stored(form), lab.bits(model)
    damage(tensors)
    quantization = Quantization.MODELOPT_FP4 if "nvfp4" in form else Quantization.NONE
    plan = lab.plan(
        lab.ragged("qwen3_moe"), quantization=quantization, activations=Activations.BF16
    )
    with pytest.raises(CheckpointError) as caught:
        lab.fill(model, TensorSource(tensors), plan)
    assert [word for word in words if word not in str(caught.value)] == []
    assert lab.bits(model) == before


def test_a_model_whose_experts_are_all_mxfp4_misses_none(lab: Any) -> None:
    """As GPT-OSS is published: two tensors stand for one stack of matrices."""
    path = lab.tiny("gpt_oss")
    tensors = load_file(path / "model.safetensors")
    stacks = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    for name in stacks:
        rows, columns = tensors.pop(name).shape[-2:]
        tensors[f"{name}_blocks"] = torch.zeros(8, columns, rows // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(8, columns, rows // 32, dtype=torch.uint8)
    plan = lab.plan(path)
    with pytest.raises(CheckpointError) as caught:
        place(build_model(plan), TensorSource(tensors), plan.quant)
    assert caught.value.what.endswith(f"model: {2 * len(stacks)} refused")
    assert caught.value.fix.startswith("convert these weights")


def test_every_kind_of_fault_is_told_at_once_with_ten_names_of_each(
    lab: Any, model: Model, stored: Callable[[str], Tensors]
) -> None:
    tensors = stored("fp32")
    for name in [name for name in tensors if name.startswith(LAYER)]:
        rename(tensors, name, f"draft.{name}")
    tensors[NORM] = torch.ones(160)
    with pytest.raises(CheckpointError) as caught:
        lab.fill(model, TensorSource(tensors), lab.plan(lab.ragged("qwen3_moe")))
    assert "12 missing, 12 unexpected, 1 mismatched" in caught.value.what
    assert caught.value.why.count("draft.") == 10
    assert caught.value.why.count("and 2 more") == 2


def test_static_scales_need_every_experts_input_scale(
    lab: Any, model: Model, stored: Callable[[str], Tensors]
) -> None:
    tensors = stored("nvfp4_modelopt")
    without(tensors, UP.replace("weight", "input_scale"))
    path = lab.ragged("qwen3_moe")
    contract = {"quantization": Quantization.MODELOPT_FP4, "decoded_cache": False}
    static = lab.plan(path, activations=Activations.PER_TENSOR, **contract)
    with pytest.raises(CheckpointError, match="1 half-paired") as caught:
        lab.fill(model, TensorSource(tensors), static)
    assert f"{UP}: no input scale" in caught.value.why
    dynamic = lab.plan(path, activations=Activations.PER_TOKEN, **contract)
    lab.fill(build_model(dynamic), TensorSource(tensors), dynamic)


def test_a_layer_that_is_ignored_needs_no_input_scales(
    lab: Any, stored: Callable[[str], Tensors]
) -> None:
    tensors, path = stored("nvfp4_modelopt"), lab.ragged("qwen3_moe")
    for name in [n for n in tensors if n.startswith(LAYER) and n.endswith("input_scale")]:
        without(tensors, name)
    plan = lab.plan(
        path, quantization=Quantization.MODELOPT_FP4, ignored_layers=("model.layers.1.mlp",)
    )
    placements = place(build_model(plan), TensorSource(tensors), plan.quant)
    assert not placements.unused
    assert any(name.endswith("input_scale") for name in placements.reading_order())


@pytest.mark.parametrize(
    ("activations", "experts"),
    [(Activations.PER_TENSOR, {0, 1, 2, 3}), (Activations.PER_TOKEN, {2, 3})],
)
def test_a_rank_reads_other_ranks_experts_only_for_a_scale_that_all_share(
    lab: Any, stored: Callable[[str], Tensors], activations: Activations, experts: set[int]
) -> None:
    plan = lab.plan(
        lab.ragged("qwen3_moe"), quantization=Quantization.MODELOPT_FP4, activations=activations
    )
    whole = build_model(plan)
    layers: Any = {
        layer: SimpleNamespace(spec=replace(one.spec, num_local_experts=2, first_local_expert=2))
        for layer, one in whole.experts.items()
    }
    source = TensorSource(stored("nvfp4_modelopt"))
    placed = place(replace(whole, experts=layers), source, plan.quant).weights
    assert {one.to.expert for one in placed if isinstance(one.to, ExpertDestination)} == experts


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (
            ExpertDestination(layer=LAYER, part=None, expert=2),
            "NVFP4 with gate and up in one matrix",
        ),
        (DenseDestination(name="a.buffer.that.is.no.slot"), "1 unexpected"),
    ],
)
def test_a_place_that_cannot_be_filled_is_refused(
    lab: Any, stored: Callable[[str], Tensors], to: Destination, words: str
) -> None:
    """What some family's names could lead to: one expert's gate and up, or something of HF's."""
    tensors = stored("nvfp4_modelopt")
    plan = lab.plan(lab.ragged("qwen3_moe"), quantization=Quantization.MODELOPT_FP4)
    model, name = build_model(plan), UP.replace("up", "gate_up")
    for part in ("weight", "weight_scale", "weight_scale_2"):
        tensors[name.replace("weight", part)] = tensors[UP.replace("weight", part)]
    names: Any = SimpleNamespace(
        draft_layers=model.names.draft_layers,
        ignored=model.names.ignored,
        resolve=lambda asked: to if asked == name else model.names.resolve(asked),
    )
    with pytest.raises(CheckpointError) as caught:
        place(replace(model, names=names), TensorSource(tensors), plan.quant)
    assert words in str(caught.value)
    assert name in caught.value.why


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_a_configuration_with_a_layer_too_few_is_refused_though_it_announces_a_draft(
    lab: Any, family: str, tmp_path: Path
) -> None:
    """The layer too many is not taken for the draft."""
    path = lab.tiny(family)
    config = json.loads((path / "config.json").read_text())
    fewer = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": fewer, "num_nextn_predict_layers": 1}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = lab.plan(tmp_path)
    source = TensorSource(load_file(path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="unexpected") as caught:
        place(build_model(plan), source, plan.quant)
    assert f"model.layers.{fewer}." in caught.value.why
    assert "missing" not in caught.value.what


def test_a_numbered_draft_layer_is_left_out_and_listed(lab: Any) -> None:
    path = lab.tiny("deepseek_v3")
    tensors = load_file(path / "model.safetensors")
    last, draft = "model.layers.3.", "model.layers.4."
    copies = {draft + name.removeprefix(last): t for name, t in tensors.items() if last in name}
    copies |= {f"{draft}eh_proj.weight": torch.zeros(64, 128)}
    plan = lab.plan(path)
    placed = place(build_model(plan), TensorSource(tensors | copies), plan.quant)
    assert placed.unused == {Unused.MTP: tuple(reading_order(copies))}


class Headers:
    """A DeepSeek-V3 checkpoint in FP8 blocks, of which only the headers exist."""

    name = "headers"

    def __init__(self, model: Model) -> None:
        self.headers: dict[str, TensorHeader] = {}
        for name, slot in model.weights.items():
            self._add(name, tuple(slot.shape))
        for layer, experts in model.experts.items():
            for expert in range(experts.spec.num_experts):
                for part in experts.spec.parts:
                    shape = experts.spec.shape_of(part)
                    self._add(f"{layer}.{expert}.{part}_proj.weight", shape)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or "_proj" not in name:
            self.headers[name] = TensorHeader(shape, torch.bfloat16, "")
            return
        self.headers[name] = TensorHeader(shape, torch.float8_e4m3fn, "")
        blocks = tuple(-(-size // 128) for size in shape)
        self.headers[f"{name}_scale_inv"] = TensorHeader(blocks, torch.float32, "")

    def read(self, names: object) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("placing reads nothing")


def test_ninety_thousand_names_are_placed_in_seconds(lab: Any, tmp_path: Path) -> None:
    """DeepSeek-V3, all of it: 90,427 tensors took 2.0 s on one core of a Sapphire Rapids Xeon."""
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    plan = lab.plan(tmp_path, dtype="bfloat16", quantization=Quantization.NVFP4_ONLINE)
    model = build_model(plan, device=torch.device("meta"))
    source = Headers(model)
    began = time.process_time()
    placements = place(model, source, plan.quant)
    order = placements.reading_order()
    seconds = time.process_time() - began
    assert len(order) == len(source.headers) == 90427
    assert seconds < 6


def test_a_placer_knows_tensors_that_it_has_seen_and_no_others(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = lab.load(lab.tiny("qwen3_moe"))
    plan = lab.plan(lab.tiny("qwen3_moe"))
    source, calls = Headers(model), []
    counted = placement.place
    monkeypatch.setattr(placement, "place", lambda *of: calls.append(of) or counted(*of))
    plain = {n: TensorHeader(tuple(t.shape), torch.float32, "") for n, t in model.weights.items()}
    source.headers = {**{n: h for n, h in source.headers.items() if "experts" in n}, **plain}
    source.headers = {
        name: structs.replace(header, dtype=torch.float32)
        for name, header in source.headers.items()
        if not name.endswith("_scale_inv")
    }
    placer = Placer(model, plan.quant)
    first = placer.place(source)
    assert placer.place(source) is first
    source.headers = {n: structs.replace(h, file="other") for n, h in source.headers.items()}
    assert placer.place(source) is first  # in which shard a tensor is changes nothing
    assert len(calls) == 1
    name = next(iter(plain))
    source.headers[name] = structs.replace(source.headers[name], dtype=torch.bfloat16)
    assert placer.place(source) is not first
    source.headers[name] = structs.replace(source.headers[name], shape=(1, 2))
    with pytest.raises(CheckpointError, match="mismatched"):
        placer.place(source)
    del source.headers[name]
    with pytest.raises(CheckpointError, match="missing"):
        placer.place(source)
