# SPDX-License-Identifier: Apache-2.0
"""Every published name of every family finds its place; nothing else does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tetrarch.core.errors import CheckpointError
from tetrarch.models.destinations import DenseDestination, ExpertDestination
from tetrarch.models.experts import is_expert_module
from tetrarch.models.names import Ignored, NamePlan
from tetrarch.moe.types import Part


def on_meta(config: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def published_names(path: Path) -> list[str]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    """DeepSeek-V3 at its published size."""
    return on_meta(AutoConfig.for_model("deepseek_v3"))


def test_each_place_of_each_family_is_named_once(
    tiny: ModuleType, tiny_checkpoint: Callable[..., object]
) -> None:
    for family in tiny.FAMILIES:
        checkpoint = tiny_checkpoint(family)
        model = on_meta(checkpoint.reference.config)
        plan = NamePlan(model)
        experts = [path for path, m in model.named_modules() if is_expert_module(m)]
        places: Counter[object] = Counter()
        for name in published_names(checkpoint.path):
            place = plan.resolve(name)
            if isinstance(place, DenseDestination):
                places[place.name] += 1
            elif place.expert is None:
                parts = (place.part,) if place.part else (Part.GATE, Part.UP)
                places.update((place.layer, p, e, place.bias) for p in parts for e in range(8))
            else:
                places[place.layer, place.part, place.expert, place.bias] += 1
        biases = (False, True) if family == "gpt_oss" else (False,)
        want = {(p, part, e, b) for p in experts for part in Part for e in range(8) for b in biases}
        want |= {n for n in model.state_dict() if ".experts." not in n}
        assert places == dict.fromkeys(want, 1), family


@pytest.mark.parametrize(
    ("family", "name", "part"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.5.gate_proj.weight", Part.GATE),
        ("qwen3_moe", "model.layers.2.mlp.experts.5.up_proj.weight", Part.UP),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.5.w1.weight", Part.GATE),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.5.w3.weight", Part.UP),
        ("minimax_m2", "model.layers.2.block_sparse_moe.experts.5.w2.weight", Part.DOWN),
    ],
)
def test_an_expert_name_says_layer_part_and_expert(
    family: str, name: str, part: Part, tiny: ModuleType
) -> None:
    plan = NamePlan(on_meta(tiny.tiny_config(family)))
    want = ExpertDestination(layer="model.layers.2.mlp.experts", part=part, expert=5)
    assert plan.resolve(name) == want
    assert plan.resolve(name) == want  # again, from the template


def test_a_fused_stack_is_split_as_gpt_oss_wrote_it(tiny_checkpoint: Callable[..., object]) -> None:
    reference = tiny_checkpoint("gpt_oss").reference
    plan = NamePlan(on_meta(reference.config))
    experts = reference.get_submodule("model.layers.1.mlp.experts")
    place = plan.resolve("model.layers.1.mlp.experts.gate_up_proj")
    stack = experts.gate_up_proj.detach()
    pieces = {(part, e): matrix for part, e, matrix in place.matrices(stack)}
    assert len(pieces) == 16
    assert torch.equal(pieces[Part.GATE, 3], stack[3].T[::2])
    assert torch.equal(pieces[Part.UP, 3], stack[3].T[1::2])
    bias = plan.resolve("model.layers.1.mlp.experts.gate_up_proj_bias")
    vectors = {(part, e): v for part, e, v in bias.matrices(experts.gate_up_proj_bias.detach())}
    assert torch.equal(vectors[Part.UP, 7], experts.gate_up_proj_bias[7, 1::2])
    down = plan.resolve("model.layers.1.mlp.experts.down_proj")
    first = next(iter(down.matrices(experts.down_proj.detach())))
    assert first[:2] == (Part.DOWN, 0)
    assert torch.equal(first[2], experts.down_proj[0].T)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", Ignored.MTP),
        ("model.layers.7.self_attn.rotary_emb.inv_freq", Ignored.ROTARY),
    ],
)
def test_known_names_without_a_place_are_listed(
    name: str, kind: Ignored, deepseek: PreTrainedModel
) -> None:
    plan = NamePlan(deepseek)
    plan.resolve("model.layers.60.mlp.experts.3.gate_proj.weight")  # learn the template first
    assert plan.resolve(name) is None
    assert plan.ignored(name) is kind


DRAFT = "model.layers.4"  # the tiny models have layers 0 to 3
MARKS = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
@pytest.mark.parametrize("mark", MARKS)
def test_a_numbered_draft_layer_is_known_by_its_mark(
    tiny: ModuleType, family: str, mark: str
) -> None:
    plan = NamePlan(on_meta(tiny.tiny_config(family, num_nextn_predict_layers=1)))
    rest = (f"{DRAFT}.mlp.experts.3.gate_proj.weight", f"{DRAFT}.input_layernorm.weight")
    drafts = plan.draft_layers([*rest, f"{DRAFT}.{mark}"])
    assert drafts == {4}
    assert {plan.ignored(name, drafts=drafts) for name in rest} == {Ignored.MTP}
    assert plan.ignored("model.layers.3.input_layernorm.weight", drafts=drafts) is None
    assert plan.draft_layers(rest) == frozenset()


@pytest.mark.parametrize(
    ("family", "announced", "layer"),
    [
        ("qwen3_moe", 1, 4),  # its drafts are named mtp.*
        ("deepseek_v3", 0, 4),
        ("deepseek_v3", 1, 5),
        ("deepseek_v3", 1, 3),
        ("glm4_moe", 2, 6),
    ],
)
def test_a_layer_past_the_models_own_is_no_draft_unless_family_and_config_say_so(
    tiny: ModuleType, family: str, announced: int, layer: int
) -> None:
    plan = NamePlan(on_meta(tiny.tiny_config(family, num_nextn_predict_layers=announced)))
    marked = [f"model.layers.{layer}.{mark}" for mark in MARKS]
    assert plan.draft_layers(marked) == frozenset()
    with pytest.raises(CheckpointError, match="eh_proj"):
        plan.resolve(marked[0])


def test_a_tied_head_is_a_second_copy(tiny: ModuleType) -> None:
    plan = NamePlan(on_meta(tiny.tiny_config("qwen3_moe", tie_word_embeddings=True)))
    assert plan.resolve("lm_head.weight") is None
    assert plan.ignored("lm_head.weight") is Ignored.TIED
    untied = NamePlan(on_meta(tiny.tiny_config("qwen3_moe")))
    assert untied.resolve("lm_head.weight") == DenseDestination("lm_head.weight")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.5.mlp.experts.7.gate_proj.weight_scale",
        "model.layers.5.mlp.experts.256.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",  # layer 0 is dense
        "model.layers.5.mlp.experts.7.side_proj.weight",
        "model.layers.5.self_attn.q_proj.weight",  # DeepSeek has q_a and q_b
        "transformer.wte.weight",
    ],
)
def test_an_unknown_name_is_an_error_that_quotes_it(name: str, deepseek: PreTrainedModel) -> None:
    plan = NamePlan(deepseek)
    plan.resolve("model.layers.5.mlp.experts.7.gate_proj.weight")
    with pytest.raises(CheckpointError, match=name):
        plan.resolve(name)


def test_all_expert_names_of_deepseek_resolve_in_a_second(deepseek: PreTrainedModel) -> None:
    plan = NamePlan(deepseek)
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(3, 61)
        for expert in range(256)
        for part in ("gate", "up", "down")
    ]
    began = time.process_time()
    places = {plan.resolve(name) for name in names}
    assert len(places) == len(names) == 44544
    assert time.process_time() - began < 2  # 0.25 s alone on a Sapphire Rapids core


def test_checkpoint_module_names_become_ours(tiny: ModuleType) -> None:
    plan = NamePlan(on_meta(tiny.tiny_config("minimax_m2")))
    assert plan.module_path("model.layers.1.block_sparse_moe") == "model.layers.1.mlp"
    assert plan.module_path("model.layers.1") == "model.layers.1"
