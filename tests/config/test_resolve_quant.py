# SPDX-License-Identifier: Apache-2.0
"""Which contract, and everything its numbers depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.core.errors import ConfigError, LaunchErrors, TetrarchError
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe, SourceFormat

BF16, FP16, FP32 = SourceFormat.BF16, SourceFormat.FP16, SourceFormat.FP32
BLOCK, TENSOR = SourceFormat.FP8_BLOCK, SourceFormat.FP8_TENSOR
MODELOPT, COMPRESSED = SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED
Refusals = Callable[..., list[TetrarchError]]


def why(plan: Plan, field: str) -> str:
    (reason,) = [d.why for d in plan.decisions if d.field == field]
    return reason


@pytest.mark.parametrize(
    ("source", "said", "contract"),
    [
        # Nothing said: the checkpoint decides.
        (BF16, {}, "none/bf16"),
        (FP16, {}, "none/bf16"),
        (FP32, {}, "none/bf16"),
        (BLOCK, {}, "none/bf16"),
        (TENSOR, {}, "none/bf16"),
        (MODELOPT, {}, "modelopt_fp4/per_tensor"),
        (COMPRESSED, {}, "modelopt_fp4/per_tensor"),
        (BF16, {"model": None}, "nvfp4_online/per_token"),
        # Activations alone.
        (MODELOPT, {"moe_activations": "per_token"}, "modelopt_fp4/per_token"),
        (COMPRESSED, {"moe_activations": "bf16"}, "modelopt_fp4/bf16"),
        (BF16, {"moe_activations": "bf16"}, "none/bf16"),
        (BF16, {"model": None, "moe_activations": "bf16"}, "nvfp4_online/bf16"),
        # Quantization alone: its default activations.
        *((source, {"quantization": "nvfp4_online"}, "nvfp4_online/per_token")
          for source in (BF16, FP16, FP32, BLOCK, TENSOR)),
        *((source, {"quantization": "modelopt_fp4"}, "modelopt_fp4/per_tensor")
          for source in (BF16, FP16, BLOCK, TENSOR, MODELOPT, COMPRESSED)),
        (BF16, {"model": None, "quantization": "none"}, "none/bf16"),
        # Both.
        (BLOCK, {"quantization": "nvfp4_online", "moe_activations": "bf16"}, "nvfp4_online/bf16"),
        (TENSOR, {"quantization": "modelopt_fp4", "moe_activations": "bf16"}, "modelopt_fp4/bf16"),
    ],
)  # fmt: skip
def test_the_contract_follows_from_checkpoint_and_flags(
    settle: Callable[..., Plan], source: SourceFormat, said: dict[str, Any], contract: str
) -> None:
    plan = settle(source=source, **said)
    assert plan.quant.contract.name == contract
    assert plan.quant.source is source


@pytest.mark.parametrize(
    ("source", "quantization", "activations", "fix"),
    [
        # No contract has these two.
        (BF16, "none", "per_token", "--quantization nvfp4_online or modelopt_fp4"),
        (BF16, "none", "per_tensor", "--quantization modelopt_fp4"),
        (BF16, "auto", "per_token", "--quantization nvfp4_online or modelopt_fp4"),
        (BF16, "nvfp4_online", "per_tensor", "--quantization modelopt_fp4"),
        # Packed FP4 is not quantized again, nor thrown away.
        (MODELOPT, "nvfp4_online", "auto", "modelopt_fp4 --moe-activations per_token"),
        (COMPRESSED, "nvfp4_online", "bf16", "modelopt_fp4 --moe-activations bf16"),
        (MODELOPT, "none", "auto", "modelopt_fp4 --moe-activations bf16"),
        # Per token without serialized weights has another name.
        *((s, "modelopt_fp4", "per_token", "--quantization nvfp4_online")
          for s in (BF16, FP16, BLOCK, TENSOR)),
    ],
)  # fmt: skip
def test_pairs_that_are_no_contract_are_refused_with_what_to_say_instead(
    refusals: Refusals, source: SourceFormat, quantization: str, activations: str, fix: str
) -> None:
    (error,) = refusals(source=source, quantization=quantization, moe_activations=activations)
    assert fix in error.fix


def test_weights_only_checkpoints_keep_bf16_activations(
    settle: Callable[..., Plan], refusals: Refusals, checkpoint: Callable[..., Checkpoint]
) -> None:
    source = checkpoint(MODELOPT, has_input_scales=False, label="ModelOpt W4A16_NVFP4")
    plan = settle(source=source)
    assert plan.quant.contract.name == "modelopt_fp4/bf16"
    assert "no input scales" in why(plan, "moe_activations")
    per_token = settle(source=source, moe_activations="per_token")
    assert per_token.quant.contract.name == "modelopt_fp4/per_token"
    (error,) = refusals(source=source, moe_activations="per_tensor")
    assert "per_token" in error.fix


def test_what_was_never_calibrated_is_said(settle: Callable[..., Plan]) -> None:
    plan = settle(source=BF16, quantization="modelopt_fp4")
    assert "never calibrated" in why(plan, "input_scale")
    serialized = settle(source=MODELOPT)
    assert "input_scale" not in [d.field for d in serialized.decisions]


def test_decoding_fp8_experts_is_reported_with_its_cost(
    settle: Callable[..., Plan], facts: ModelFacts
) -> None:
    reason = why(settle(source=BLOCK), "expert_weights")
    assert "54.0 GiB instead of 27.0 GiB" in reason
    assert "nvfp4_online would keep them in 15.2 GiB" in reason
    online = settle(source=BLOCK, quantization="nvfp4_online")
    assert "expert_weights" not in [d.field for d in online.decisions]


def test_the_checkpoints_exclusions_do_not_exempt_experts_online(
    settle: Callable[..., Plan], checkpoint: Callable[..., Checkpoint]
) -> None:
    layer = "model.layers.3.mlp.experts"
    source = checkpoint(TENSOR, quant_ignore=("model.layers.3", "lm_head"))
    for activations in ("per_token", "bf16"):
        online = settle(source=source, quantization="nvfp4_online", moe_activations=activations)
        assert not online.quant.ignores(layer)
        assert "2 exclusions do not exempt" in why(online, "fp4_ignored_layers")
    static = settle(source=source, quantization="modelopt_fp4")
    assert static.quant.ignores(layer)


def test_only_the_operator_exempts_experts_online(settle: Callable[..., Plan]) -> None:
    plan = settle(quantization="nvfp4_online", fp4_ignored_layers=("layers.3", "layers.4?.*"))
    names = [f"model.layers.{i}.mlp.experts" for i in (3, 4, 30, 40)]
    assert [plan.quant.ignores(name) for name in names] == [True, False, False, True]


def test_patterns_must_make_sense(refusals: Refusals) -> None:
    (error,) = refusals(quantization="nvfp4_online", fp4_ignored_layers=("re:(",))
    assert "'re:('" in error.what


@pytest.mark.parametrize(
    ("hidden", "intermediate", "words"),
    [(2056, 768, "hidden size 2056"), (2048, 770, "intermediate size 770")],
)
def test_sizes_that_have_no_whole_blocks_are_refused(
    refusals: Refusals,
    settle: Callable[..., Plan],
    facts: ModelFacts,
    hidden: int,
    intermediate: int,
    words: str,
) -> None:
    odd = replace(facts, expert_hidden_size=hidden, expert_intermediate_size=intermediate)
    (error,) = refusals(quantization="nvfp4_online", model_facts=odd)
    assert words in error.what
    assert settle(model_facts=odd).quant.contract.name == "none/bf16"


def test_a_model_without_experts_has_nothing_to_quantize(
    refusals: Refusals, facts: ModelFacts
) -> None:
    (error,) = refusals(quantization="nvfp4_online", model_facts=replace(facts, num_moe_layers=0))
    assert "no experts" in error.what


# Four-over-six and the second GEMM's factor.


def test_weights_always_choose_between_six_and_four(settle: Callable[..., Plan]) -> None:
    quant = settle(quantization="nvfp4_online").quant
    assert quant.weight_recipe == WEIGHT_RECIPE == Recipe(448, "mse", half_error=True)
    assert quant.activation_recipe is None
    assert quant.fc2_input_scale == 1 / 2688


def test_four_over_six_moves_the_factor_with_its_largest_scale(
    settle: Callable[..., Plan],
) -> None:
    quant = settle(
        quantization="nvfp4_online",
        four_over_six=True,
        four_over_six_e4m3_max="256",
        four_over_six_error="mse",
        four_over_six_half_error=True,
    ).quant
    assert quant.activation_recipe == Recipe(256, "mse", half_error=True)
    assert quant.fc2_input_scale == 1 / 1536
    assert quant.weight_recipe == WEIGHT_RECIPE


def test_sglangs_factor_can_be_asked_for(settle: Callable[..., Plan]) -> None:
    assert settle(quantization="nvfp4_online", fc2_input_scale=1.0).quant.fc2_input_scale == 1


def test_another_factor_misleads_four_over_six(
    refusals: Refusals, settle: Callable[..., Plan]
) -> None:
    online = {"quantization": "nvfp4_online", "four_over_six": True}
    (error,) = refusals(**online, fc2_input_scale=1.0)
    assert "ranks the two candidates wrongly" in error.why
    assert settle(**online, fc2_input_scale=1 / 2688).quant.activation_recipe == Recipe()


FACTORS = (1.0, 0.5, 1e-6, 1 / 2688, 1 / 1536, 1 / 2688 * 1.000002, 1 / 1536 * 0.999998)


@pytest.mark.parametrize("e4m3_max", ["448", "256"])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_that_a_forward_would_refuse_is_refused_at_launch(
    settle: Callable[..., Plan], factor: float, e4m3_max: str
) -> None:
    said = {"quantization": "nvfp4_online", "four_over_six": True, "fc2_input_scale": factor}

    def launch() -> bool:
        try:
            settle(**said, four_over_six_e4m3_max=e4m3_max)
        except LaunchErrors:
            return False
        return True

    def forward() -> bool:
        recipe = Recipe(int(e4m3_max), "mae", half_error=False)
        try:
            nvfp4.fake_quant_per_token(torch.ones(1, 16), factor=factor, recipe=recipe)
        except ConfigError:
            return False
        return True

    assert launch() is forward() is (factor == 1 / (6 * int(e4m3_max)))


@pytest.mark.parametrize(
    "settings",
    [
        {"four_over_six": True},
        {"quantization": "nvfp4_online", "moe_activations": "bf16", "four_over_six": True},
        {"quantization": "nvfp4_online", "four_over_six_e4m3_max": "256"},
        {"fc2_input_scale": 1.0},
        {"quantization": "modelopt_fp4", "fc2_input_scale": 1.0},
        {"fp4_ignored_layers": ("layers.3",)},
    ],
)
def test_a_setting_without_effect_is_refused(refusals: Refusals, settings: dict[str, Any]) -> None:
    (error,) = refusals(**settings)
    assert "has no effect" in error.what


def test_a_dummys_weights_are_stored_as_its_contract_wants(
    settle: Callable[..., Plan], refusals: Callable[..., list[TetrarchError]]
) -> None:
    """Negative control: a checkpoint that holds BF16 cannot be per token under modelopt_fp4."""
    settings = dict(quantization="modelopt_fp4", moe_activations="per_token")
    plan = settle(load_format="dummy", **settings)
    assert plan.quant.contract.name == "modelopt_fp4/per_token"
    assert [error.what for error in refusals(**settings)] != []
