# SPDX-License-Identifier: Apache-2.0
"""A loaded model computes what Hugging Face computes with the same weights, decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tetrarch.core.errors import CheckpointError
from tetrarch.models.build import build_model
from tetrarch.models.load import load_weights
from tetrarch.models.report import Unused
from tetrarch.models.sources import SafetensorsSource, TensorSource
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Activations, Quantization, SourceFormat

FAMILIES = ("qwen3_moe", "deepseek_v3", "minimax_m2")
FORMS = ("bf16", "fp16", "fp8_block", "fp8_tensor", "nvfp4_modelopt", "nvfp4_compressed")
W4A16: dict[str, Any] = {
    "quantization": Quantization.MODELOPT_FP4,
    "activations": Activations.BF16,
    "decoded_cache": False,
}
LAYER = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_form_equals_hugging_face_on_the_decoded_weights(
    lab: Any, family: str, form: str
) -> None:
    path, values = lab.store(lab.ragged(family), form)
    model, report = lab.load(path, **(W4A16 if "nvfp4" in form else {}))
    torch.testing.assert_close(lab.logits(model), lab.reference(path, values))
    assert set(report.formats.values()) == {SourceFormat(form)}
    plain = form in ("bf16", "fp16")
    assert [cost.format for cost in report.decoded] == ([] if plain else [SourceFormat(form)])
    assert report.num_expert_matrices == 3 * 4 * len(model.experts)
    assert report.num_dense == len(model.weights)


def test_the_comparison_would_see_one_swapped_gate_and_up(lab: Any) -> None:
    """Negative control of the test above: one expert of eight suffices."""
    path = lab.ragged("qwen3_moe")
    values = load_file(path / "model.safetensors")
    gate, up = (f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
    values[gate], values[up] = values[up], values[gate]
    model, _ = lab.load(path)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(lab.logits(model), lab.reference(path, values))


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "gpt_oss"])
def test_other_layouts_of_experts_load_too(lab: Any, family: str) -> None:
    """Here: w1, w2, w3; a shared expert and attention biases; stacked, transposed, interleaved."""
    path = lab.tiny(
        family, num_hidden_layers=2, **({"layer_types": None} if "oss" in family else {})
    )
    model, report = lab.load(path)
    torch.testing.assert_close(lab.logits(model), lab.reference(path))
    assert not report.unused


def whole_export(lab: Any, form: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Attention in NVFP4 as well, a calibrated KV cache and a draft layer, as exporters write."""
    path, values = lab.store(lab.ragged("qwen3_moe"), form)
    stored = load_file(path / "model.safetensors")
    for layer in range(2):
        for one in "kv":
            name = f"model.layers.{layer}.self_attn.{one}_proj.{one}_scale"
            stored[name] = torch.tensor(0.5)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    stored["mtp.fc.weight"] = torch.ones(16, 16)
    stored["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(16, 16)
    save_file(stored, path / "model.safetensors")
    return path, values


@pytest.mark.parametrize(
    "activations", [Activations.PER_TENSOR, Activations.PER_TOKEN, Activations.BF16]
)
def test_a_whole_export_with_quantized_attention_loads_and_says_what_it_left_out(
    lab: Any, activations: Activations
) -> None:
    path, values = whole_export(lab, "nvfp4_modelopt")
    model, report = lab.load(path, **(W4A16 | {"activations": activations}))
    assert {kind: len(names) for kind, names in report.unused.items()} == {
        Unused.KV_SCALE: 4,
        Unused.ROTARY: 1,
        Unused.MTP: 2,
        # Four projections of two layers; the experts' only where no static scale wants them.
        Unused.NVFP4_INPUT_SCALE: 8 + (0 if activations is Activations.PER_TENSOR else 24),
    }
    attention = [name for name in values if "self_attn" in name and lab.linears(name)]
    elements = sum(values[name].numel() for name in attention)
    (cost,) = report.decoded
    assert (cost.num_weights, cost.format) == (len(attention), SourceFormat.NVFP4_MODELOPT)
    assert cost.decoded_bytes == 4 * elements
    assert cost.stored_bytes == elements // 2 + elements // 16 + 8 * (4 + 4)
    assert all(torch.equal(model.weights[name], values[name]) for name in attention)
    if activations is Activations.BF16:
        torch.testing.assert_close(lab.logits(model), lab.reference(path, values))


@pytest.fixture
def exported(lab: Any, golden: Path, tmp_path: Path) -> Any:
    """An exporter's own experts in a whole checkpoint; the goldens hold `.mlp.` alone."""

    def make(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        rest = lab.tiny(
            "qwen3_moe", num_hidden_layers=1, num_experts=2, moe_intermediate_size=64, head_dim=32
        )
        theirs = load_file(golden / name / "model.safetensors")
        stored = load_file(rest / "model.safetensors")
        kept = {key: value for key, value in stored.items() if ".experts." not in key}
        save_file(kept | theirs, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((rest / "config.json").read_text())
        return tmp_path, theirs

    return make


@pytest.mark.parametrize(
    ("name", "codes", "form"),
    [
        ("modelopt_nvfp4_tiny_moe", "weight", SourceFormat.NVFP4_MODELOPT),
        ("ct_nvfp4_tiny_moe", "weight_packed", SourceFormat.NVFP4_COMPRESSED),
    ],
)
def test_nvfp4_experts_keep_the_bytes_that_the_exporter_wrote(
    lab: Any, exported: Any, golden: Path, name: str, codes: str, form: SourceFormat
) -> None:
    path, theirs = exported(name)
    model, report = lab.load(path, **W4A16)
    assert report.formats == {LAYER: form}
    weights = model.experts[LAYER].weights
    source = load_file(golden / "modelopt_nvfp4_tiny_moe" / "source_bf16.safetensors")
    for expert in range(2):
        stem = f"{LAYER}.{expert}"
        gate_up = [theirs[f"{stem}.{part}_proj.{codes}"] for part in ("gate", "up")]
        assert torch.equal(weights["gate_up"][expert], torch.cat(gate_up))
        values = nvfp4.decode(
            weights["down"][expert],
            weights["down_block_scale"][expert],
            global_scale=weights["down_scale"][expert],
        )
        exact = source[f"{LAYER}.down_proj"][expert].float()
        error = (values - exact).norm() / exact.norm()
        assert error < 0.12, "a scale that encodes in place of one that decodes is off by orders"


def test_modelopt_fp8_experts_are_decoded_with_one_rounding(lab: Any, exported: Any) -> None:
    path, theirs = exported("modelopt_fp8_tiny_moe")
    model, report = lab.load(path, dtype="bfloat16")
    weights = model.experts[LAYER].weights
    for expert in range(2):
        stem = f"{LAYER}.{expert}.down_proj"
        want = (theirs[f"{stem}.weight"].float() * theirs[f"{stem}.weight_scale"]).bfloat16()
        assert torch.equal(weights["down"][expert], want)
    assert len(report.unused[Unused.FP8_INPUT_SCALE]) == 6


def test_a_tied_head_needs_no_tensor_and_a_copy_of_it_is_left_out(lab: Any) -> None:
    path = lab.tiny("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=1)
    values = load_file(path / "model.safetensors")
    values.pop("lm_head.weight", None)
    plan = lab.plan(path)
    model = build_model(plan)
    lab.fill(model, TensorSource(values), plan)
    want = lab.reference(path, values)
    torch.testing.assert_close(lab.logits(model), want)
    source = TensorSource(values | {"lm_head.weight": values["model.embed_tokens.weight"].clone()})
    assert lab.fill(model, source, plan).unused == {Unused.TIED: ("lm_head.weight",)}
    torch.testing.assert_close(lab.logits(model), want)


def test_the_demo_model_loads_online_without_its_draft_layers(lab: Any, demo_path: Path) -> None:
    model, report = lab.load(
        demo_path, dtype="bfloat16", quantization=Quantization.NVFP4_ONLINE, decoded_cache=False
    )
    assert len(model.experts) == 6
    assert set(report.unused) == {Unused.MTP}
    assert all(name.startswith("mtp.") for name in report.unused[Unused.MTP])


class Bar:
    """A progress bar that remembers."""

    def __init__(self) -> None:
        self.total = self.done = self.finished = 0

    def start(self, label: str, total: int, unit: str) -> None:
        assert (label, unit) == ("loading weights", "bytes")
        self.total = total

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def finish(self) -> None:
        self.finished += 1


def test_the_bar_ends_where_it_said_it_would(lab: Any) -> None:
    path, bar = lab.tiny("qwen3_moe", num_hidden_layers=2), Bar()
    plan = lab.plan(path)
    source = SafetensorsSource(path)
    report = load_weights(build_model(plan), source, plan=plan.quant, progress=bar)
    assert bar.total == bar.done == report.num_bytes
    assert bar.finished == 1


def test_a_scale_that_is_no_number_stops_the_load_and_the_bar(lab: Any) -> None:
    path, _ = lab.store(lab.ragged("qwen3_moe"), "nvfp4_modelopt")
    name = f"{LAYER}.2.up_proj.weight_scale_2"
    tensors = load_file(path / "model.safetensors") | {name: torch.tensor(float("inf"))}
    plan, bar = lab.plan(path, **W4A16), Bar()
    with pytest.raises(CheckpointError, match=name):
        load_weights(build_model(plan), TensorSource(tensors), plan=plan.quant, progress=bar)
    assert bar.finished == 1
    assert bar.done < bar.total


class Forgetful(TensorSource):
    """A source whose headers promise a tensor that it does not yield."""

    forgotten = ""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Leave one out."""
        return super().read(name for name in names if name != self.forgotten)


@pytest.mark.parametrize(
    "forgotten", [f"{LAYER}.1.gate_proj.weight", "model.layers.0.input_layernorm.weight"]
)
def test_a_source_that_does_not_yield_what_it_promised_is_an_error(
    lab: Any, forgotten: str
) -> None:
    path = lab.ragged("qwen3_moe")
    plan = lab.plan(path)
    source = Forgetful(load_file(path / "model.safetensors"))
    source.forgotten = forgotten
    with pytest.raises(CheckpointError, match="1 missing") as caught:
        lab.fill(build_model(plan), source, plan)
    assert forgotten in caught.value.why
