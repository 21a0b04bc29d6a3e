# SPDX-License-Identifier: Apache-2.0
"""How much is drafted, by which weights, and what these are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.drafts import DraftCheckpoint, DraftScan
from tetrarch.config.headers import TensorHeader, WeightScan
from tetrarch.config.plan import ModelFacts, Plan, SpecPlan
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import CheckpointError, ConfigError, TetrarchError
from tetrarch.numerics.contract import SourceFormat

Settle = Callable[..., Plan]
Refusals = Callable[..., list[TetrarchError]]
MTP = {"speculative_algorithm": "mtp"}
EXPERT = "mtp.layers.0.mlp.experts.0.up_proj.weight"
BF16, NVFP4 = SourceFormat.BF16, SourceFormat.NVFP4_MODELOPT


def scan(dtype: str, *, name: str = EXPERT, linear: str = "BF16") -> DraftScan:
    ours = EXPERT.removeprefix("mtp.")
    return DraftScan({name: ours}, {name: header(name, dtype)}, frozenset({linear}))


def header(name: str, dtype: str) -> TensorHeader:
    """A matrix of 32 rows and 64 values in each."""
    shape = (32, 32) if dtype == "U8" else (32, 64)
    return TensorHeader(name, dtype, shape, 1 << 11, "f", 0)


@pytest.fixture(scope="session")
def drafting(
    settle: Settle, checkpoint: Callable[..., Checkpoint], facts: ModelFacts
) -> Callable[..., Plan]:
    """Return `settle` with speculation on: format, the draft's type, settings → plan."""

    def run(source: SourceFormat = BF16, draft: DraftScan | None = None, **settings: Any) -> Plan:
        described = checkpoint(source, weights=WeightScan(num_bytes=1), draft=draft or scan("BF16"))
        mtp = replace(facts, num_mtp_layers=1)
        return settle(source=described, model_facts=mtp, **{**MTP, **settings})

    return run


@pytest.fixture(scope="session")
def refused(drafting: Callable[..., Plan]) -> Callable[..., list[TetrarchError]]:
    def run(*arguments: Any, **settings: Any) -> list[TetrarchError]:
        with pytest.raises(TetrarchError) as caught:
            drafting(*arguments, **settings)
        return list(vars(caught.value)["errors"])

    return run


def decisions(plan: Plan) -> Mapping[str, str]:
    return {d.field: f"{d.value}: {d.why}" for d in plan.decisions}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 3),
        ({"speculative_num_steps": 5}, 5),
        ({"speculative_num_draft_tokens": 3}, 2),
        ({"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}, 1),
        ({"speculative_eagle_topk": 1}, 3),
    ],
)
def test_missing_numbers_are_completed(
    drafting: Callable[..., Plan], settings: dict[str, Any], steps: int
) -> None:
    plan = drafting(**settings)
    assert plan.spec == SpecPlan("mtp", num_steps=steps, num_draft_tokens=steps + 1)
    assert decisions(plan)["speculative_num_draft_tokens"].startswith(f"{steps + 1}: ")


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
        {"speculative_num_steps": 3, "speculative_num_draft_tokens": 8},
        {"speculative_num_draft_tokens": 1},
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    refused: Refusals, settings: dict[str, Any]
) -> None:
    (error,) = refused(**settings)
    assert isinstance(error, ConfigError)
    assert (
        f"--speculative-num-draft-tokens {settings['speculative_num_draft_tokens']}" in error.what
    )
    assert "leave it out" in error.fix


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_num_steps": 3},
        {"speculative_num_draft_tokens": 4},
        {"speculative_eagle_topk": 1},
        {"speculative_draft_model_path": "/d"},
        {"speculative_draft_quantization": "none"},
        {"speculative_adaptive": True},
    ],
)
def test_details_need_an_algorithm(refusals: Refusals, settings: dict[str, Any]) -> None:
    (error,) = refusals(**settings)
    assert isinstance(error, ConfigError)
    assert "without --speculative-algorithm" in error.what
    assert error.fix == "add --speculative-algorithm MTP, or leave it out"


def test_none_switches_drafting_off(drafting: Callable[..., Plan], refusals: Refusals) -> None:
    plan = drafting(speculative_algorithm="none")
    assert plan.spec is None
    assert decisions(plan)["mtp_layers"] == "not loaded: speculation is off"
    assert len(refusals(speculative_algorithm="none", speculative_num_steps=3)) == 1


def test_adaptive_drafting_is_asked_for(drafting: Callable[..., Plan]) -> None:
    spec = drafting(speculative_adaptive=True).spec
    assert spec is not None
    assert spec.adaptive
    found = decisions(drafting(speculative_adaptive=True, speculative_num_steps=5))
    assert found["speculative_adaptive"].startswith("on: asked for; from 0 to 5 drafts")
    assert decisions(drafting())["speculative_adaptive"] == "off: always 3 drafts"


def test_a_model_without_draft_weights_is_refused_and_told_what_helps(
    settle: Settle, refusals: Refusals, checkpoint: Callable[..., Checkpoint], facts: ModelFacts
) -> None:
    (error,) = refusals(**MTP)
    assert isinstance(error, ConfigError)
    assert "no MTP layer" in error.what
    assert "--speculative-draft-model-path" in error.fix
    announced = replace(facts, num_mtp_layers=1)
    empty = checkpoint(weights=WeightScan(num_bytes=1))
    (error,) = refusals(source=empty, model_facts=announced, **MTP)
    assert "config.json announces 1" in error.why
    planned = settle(model_facts=announced, **MTP)  # by config.json alone
    assert planned.spec is not None


def test_of_several_draft_layers_the_first_is_used(
    settle: Settle, checkpoint: Callable[..., Checkpoint], facts: ModelFacts
) -> None:
    plan = settle(
        source=checkpoint(draft=scan("BF16")), model_facts=replace(facts, num_mtp_layers=3), **MTP
    )
    assert decisions(plan)["mtp_layers"].startswith("the first of 3: ")


@pytest.mark.parametrize(
    ("source", "draft", "settings", "contract", "words"),
    [
        (BF16, "BF16", {}, "none/bf16", "bf16 as stored"),
        (BF16, "BF16", {"quantization": "nvfp4_online"}, "nvfp4_online/per_token", "online"),
        (
            BF16,
            "F8_E4M3",
            {"quantization": "nvfp4_online", "moe_activations": "bf16"},
            "nvfp4_online/bf16",
            "quantized online",
        ),
        (NVFP4, "U8", {}, "modelopt_fp4/per_tensor", "serialized nvfp4"),
        (NVFP4, "BF16", {}, "none/bf16", "bf16 as stored"),
        (NVFP4, "F8_E4M3", {}, "none/bf16", "f8_e4m3 as stored"),
        (
            NVFP4,
            "BF16",
            {"moe_activations": "per_token", "speculative_draft_quantization": "nvfp4_online"},
            "nvfp4_online/per_token",
            "quantized online",
        ),
        (
            NVFP4,
            "BF16",
            {"moe_activations": "bf16", "speculative_draft_quantization": "nvfp4_online"},
            "nvfp4_online/bf16",
            "quantized online",
        ),
        (
            NVFP4,
            "BF16",
            {"speculative_draft_quantization": "nvfp4_online"},
            "modelopt_fp4/per_tensor",
            "never calibrated",
        ),
        (
            BF16,
            "BF16",
            {"speculative_draft_quantization": "nvfp4_online"},
            "nvfp4_online/bf16",
            "quantized online",
        ),
    ],
)
def test_one_contract_decided_by_what_the_tensors_are(
    drafting: Callable[..., Plan],
    source: SourceFormat,
    draft: str,
    settings: dict[str, Any],
    contract: str,
    words: str,
) -> None:
    plan = drafting(source, scan(draft), **settings)
    at = plan.quant.at("mtp.layers.0.mlp.experts").contract
    assert at.name == contract
    assert at.activations in (plan.quant.contract.activations, "bf16")
    assert words in decisions(plan)["draft_experts"]
    assert plan.quant.at("model.layers.0.mlp.experts") is plan.quant


def test_the_checkpoints_exclusions_do_not_exempt_a_draft_but_the_operators_do(
    settle: Settle, checkpoint: Callable[..., Checkpoint], drafting: Callable[..., Plan]
) -> None:
    source = checkpoint(BF16, quant_ignore=("mtp*",), draft=scan("BF16"))
    plan = settle(source=source, quantization="nvfp4_online", **MTP)
    assert not plan.quant.at("mtp.layers.0.mlp.experts").ignored_layers
    numbered = scan("BF16", name="model.layers.48.mlp.experts.0.up_proj.weight")
    for pattern in ("model.layers.48", "mtp", "re:.*experts$"):
        exempt = drafting(
            BF16, numbered, quantization="nvfp4_online", fp4_ignored_layers=(pattern,)
        )
        at = exempt.quant.at("mtp.layers.0.mlp.experts")
        assert at.ignores("mtp.layers.0.mlp.experts")
        assert "--fp4-ignored-layers" in decisions(exempt)["draft_experts"]
    bound = drafting(
        BF16, numbered, quantization="nvfp4_online", fp4_ignored_layers=("model.layers.4",)
    )
    assert not bound.quant.at("mtp.layers.0.mlp.experts").ignores("mtp.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("source", "draft", "settings", "words"),
    [
        (
            NVFP4,
            "BF16",
            {"speculative_draft_quantization": "modelopt_fp4"},
            ("modelopt_fp4", f"{EXPERT} is stored as BF16 (32, 64)", "U8 (32, 32)"),
        ),
        (
            NVFP4,
            "U8",
            {"speculative_draft_quantization": "nvfp4_online"},
            (
                "nvfp4_online",
                f"{EXPERT} is stored as serialized NVFP4, U8 (32, 32)",
                "BF16 (32, 64)",
            ),
        ),
        (
            NVFP4,
            "U8",
            {"speculative_draft_quantization": "none"},
            ("none", EXPERT, "U8 (32, 32)", "BF16 (32, 64)"),
        ),
        (
            BF16,
            "U8",
            {"quantization": "nvfp4_online"},
            ("nvfp4_online", EXPERT, "U8 (32, 32)", "BF16 (32, 64)"),
        ),
        (
            BF16,
            "BF16",
            {"quantization": "nvfp4_online", "speculative_draft_quantization": "none"},
            (
                "--speculative-draft-quantization none",
                "--quantization nvfp4_online",
                f"{EXPERT} is stored as BF16 (32, 64)",
                "U8 (32, 32)",
            ),
        ),
    ],
)
def test_an_override_that_contradicts_names_the_tensor_both_types_and_both_shapes(
    refused: Refusals,
    source: SourceFormat,
    draft: str,
    settings: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    (error,) = refused(source, scan(draft), **settings)
    assert isinstance(error, CheckpointError | ConfigError)
    assert all(word in f"{error.what} {error.why}" for word in words)
    assert error.fix


def test_a_draft_in_two_formats_is_refused(refused: Refusals) -> None:
    other = EXPERT.replace("up", "down")
    experts = {EXPERT: header(EXPERT, "U8"), other: header(other, "BF16")}
    mixed = DraftScan({EXPERT: "a", other: "b"}, experts)
    (error,) = refused(NVFP4, mixed)
    assert EXPERT in error.why
    assert other in error.why


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "glm4_moe"}, "model_type is 'glm4_moe', the model's 'qwen3_moe'"),
        ({"hidden_size": 64}, "hidden_size is 64, the model's 2048"),
        ({"vocab_size": 1000}, "vocab_size is 1000, the model's 151936"),
    ],
)
def test_a_draft_of_another_model_is_refused(
    start: Callable[..., Plan], fields: dict[str, object], words: str
) -> None:
    with pytest.raises(TetrarchError) as caught:
        start(DraftCheckpoint("/d", fields, scan("BF16")))
    assert words in str(caught.value)


def test_a_separate_draft_gives_its_path_and_its_own_tensors_decide(
    start: Callable[..., Plan],
) -> None:
    plan = start(DraftCheckpoint("/d", {"hidden_size": 2048}, scan("BF16")))
    assert plan.spec is not None
    assert plan.spec.draft_path == "/d"
    assert decisions(plan)["draft_experts"].startswith("bf16 as stored")
    with pytest.raises(TetrarchError) as caught:
        start(DraftCheckpoint("/d", {}, DraftScan()))
    assert "holds no MTP layer of this model" in str(caught.value)


@pytest.fixture(scope="session")
def start(
    checkpoint: Callable[..., Checkpoint], facts: ModelFacts, machine: Callable[..., Any]
) -> Callable[..., Plan]:
    """Return `resolve` of a model whose draft is elsewhere."""
    args = LaunchArgs(model="m", speculative_draft_model_path="/d", **MTP)
    return lambda draft: resolve(args, checkpoint(), facts, machine(), draft=draft)
