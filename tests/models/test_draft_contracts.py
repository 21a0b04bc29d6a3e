# SPDX-License-Identifier: Apache-2.0
"""What a draft's experts are made of: the target's contract, decided by flags and headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tetrarch.config.cli import read_keywords
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import Plan, QuantPlan
from tetrarch.core.progress import NoProgress
from tetrarch.models.build import Model, build_model
from tetrarch.models.describe import describe
from tetrarch.models.load import load_weights
from tetrarch.models.readback import digests_of
from tetrarch.models.sources import SafetensorsSource, open_checkpoint
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import CanonicalExperts, Part, PlainExperts

Drafted = Callable[..., Path]
FILE = "model.safetensors"
EXPERTS = "mtp.layers.0.mlp.experts"
CPU = Device(
    arch=Arch.CPU,
    name="cpu",
    torch_device="cpu",
    num_devices=1,
    memory_bytes=1 << 33,
    physical_cores=1,
)


def drafts_codes(path: Path, layer: MoELayer, plan: QuantPlan) -> CanonicalExperts:
    """The draft's experts of a folder, quantized by themselves."""
    stager, source = ExpertStager(layer.spec, plan), SafetensorsSource(path)
    names = {"gate_proj": Part.GATE, "up_proj": Part.UP, "down_proj": Part.DOWN}
    for name, tensor in source.read([name for name in source.headers if name.startswith(EXPERTS)]):
        expert, part, _ = name.removeprefix(f"{EXPERTS}.").split(".")
        stager.put(names[part], int(expert), tensor)
    experts = stager.finish()
    assert isinstance(experts, CanonicalExperts)
    return experts


def launched(path: Path, **settings: Any) -> tuple[Model, Plan]:
    reading = read_keywords({"model": path, "speculative_algorithm": "mtp", **settings}, {})
    plan = plan_launch(reading, describe=describe, device=CPU)
    model, source = build_model(plan), open_checkpoint(plan, plan.model.path)
    load_weights(model, source, plan=plan.quant, progress=NoProgress())
    return model, plan


def stored(lab: Any, path: Path, form: str, section: dict[str, Any]) -> Path:
    """Store the target's experts in a form and leave the draft as it is, and say so."""
    out, _ = lab.store(path, form, lambda n: lab.experts(n) and not n.startswith("mtp."))
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= section
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_draft_that_the_source_excludes_is_quantized_per_token(
    lab: Any, drafted_checkpoint: Drafted
) -> None:
    """Its codes are those of quantizing the source's values directly."""
    path = stored(
        lab, drafted_checkpoint("qwen3_moe"), "fp8_block", {"modules_to_not_convert": ["mtp"]}
    )
    model, plan = launched(path, quantization="nvfp4_online")
    assert plan.quant.contract.name == "nvfp4_online/per_token"
    want = drafts_codes(path, model.experts[EXPERTS], plan.quant)
    assert digests_of(EXPERTS, model.experts[EXPERTS].canonical()) == digests_of(EXPERTS, want)
    [said] = [d for d in plan.decisions if d.field == "draft_experts"]
    assert said.value == "quantized online"
    plain, _ = launched(path, quantization="nvfp4_online", fp4_ignored_layers=["mtp"])
    kept = plain.experts[EXPERTS].canonical()
    assert isinstance(kept, PlainExperts)  # negative control: the operator's word counts


@pytest.mark.parametrize("form", ["nvfp4_modelopt", "nvfp4_compressed"])
def test_a_plain_draft_in_a_serialized_checkpoint_is_what_it_is_or_quantized_if_asked(
    lab: Any, drafted_checkpoint: Drafted, form: str
) -> None:
    path = stored(lab, drafted_checkpoint("qwen3_moe"), form, {"ignore": ["re:^mtp.*"]})
    model, _ = launched(path)
    assert isinstance(model.experts[EXPERTS].canonical(), PlainExperts)
    assert isinstance(model.experts["model.layers.3.mlp.experts"].canonical(), CanonicalExperts)
    for activations in ("per_token", "per_tensor", "bf16"):
        asked, plan = launched(
            path, moe_activations=activations, speculative_draft_quantization="nvfp4_online"
        )
        want = drafts_codes(path, asked.experts[EXPERTS], plan.quant.at(EXPERTS))
        assert digests_of(EXPERTS, asked.experts[EXPERTS].canonical()) == digests_of(EXPERTS, want)


def test_a_serialized_draft_stays_serialized(lab: Any, drafted_checkpoint: Drafted) -> None:
    path, _ = lab.store(drafted_checkpoint("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    model, plan = launched(path)
    assert plan.quant.at(EXPERTS).contract is plan.quant.contract
    assert isinstance(model.experts[EXPERTS].canonical(), CanonicalExperts)


def test_a_draft_of_its_own_folder_is_loaded_with_the_target(
    drafted_checkpoint: Drafted, tiny_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    """As a whole checkpoint, or as MTP tensors alone; the target's own draft is left out."""
    whole = drafted_checkpoint("qwen3_moe", seed=1)
    tensors = load_file(whole / FILE)
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file({n: t for n, t in tensors.items() if n.startswith("mtp.")}, alone / FILE)
    told = launched(whole)[0].experts[EXPERTS].canonical()
    for target in (tiny_checkpoint("qwen3_moe").path, drafted_checkpoint("qwen3_moe")):
        for draft in (whole, alone):
            model, plan = launched(target, speculative_draft_model_path=str(draft))
            found = model.experts[EXPERTS].canonical()
            assert digests_of(EXPERTS, found) == digests_of(EXPERTS, told)
            norm = load_file(target / FILE)["model.norm.weight"]
            assert torch.equal(model.weights["model.norm.weight"].float(), norm.float())
            source = open_checkpoint(plan, plan.model.path)
            assert str(draft) in source.name
            assert str(target) in source.name


def test_an_update_brings_its_own_draft_or_leaves_the_other_folders(
    drafted_checkpoint: Drafted, tiny_checkpoint: Callable[..., Any]
) -> None:
    target, draft = tiny_checkpoint("qwen3_moe").path, drafted_checkpoint("qwen3_moe", seed=1)
    _, plan = launched(target, speculative_draft_model_path=str(draft))
    without = tiny_checkpoint("qwen3_moe", seed=2).path
    assert str(draft) in open_checkpoint(plan, str(without)).name
    own = drafted_checkpoint("qwen3_moe", seed=3)
    assert open_checkpoint(plan, str(own)).name == str(own)
