# SPDX-License-Identifier: Apache-2.0
"""Ranks are declared, and refused until they exist; graphs are for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.config.hardware import Arch
from tetrarch.config.plan import GraphPlan, ParallelPlan, Plan
from tetrarch.core.errors import BudgetTooSmall, TetrarchError, Unsupported

Refusals = Callable[..., list[TetrarchError]]


@pytest.mark.parametrize(
    "settings",
    [
        {"tp_size": 2},
        {"dp_size": 4},
        {"ep_size": 8},
        {"cuda_graphs": "on"},
        {"graph_max_batch": 64},
        {"graph_max_prefill_tokens": 2048},
        {"max_dispatch_tokens": 1024},
        {"fused_finalize": True},
        {"moe_dispatch": "all_to_all"},
        {"moe_wire": "nvfp4"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_does_not_exist_yet_is_a_typed_refusal(
    refusals: Refusals, settings: dict[str, Any]
) -> None:
    (error,) = refusals(**settings)
    assert isinstance(error, Unsupported)
    assert "not supported" in error.what
    assert error.fix


@pytest.mark.parametrize(
    "settings",
    [
        {"tp_size": 1, "dp_size": 1, "ep_size": 1},
        {"cuda_graphs": "off"},
        {"graph_max_batch": 0, "graph_max_prefill_tokens": 0},
    ],
)
def test_asking_for_what_is_there_is_no_refusal(
    settle: Callable[..., Plan], settings: dict[str, Any]
) -> None:
    plan = settle(**settings)
    assert plan.parallel == ParallelPlan(tp=1, dp=1, ep=1)
    assert plan.graphs == GraphPlan(0, 0)
    assert plan.spec is None


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, "576 tokens required, capacity 511"),
        ({"graph_max_prefill_tokens": 2048}, "2048 tokens required"),
        ({"graph_max_batch": 600}, "600 tokens required"),
        (
            {
                "speculative_algorithm": "mtp",
                "speculative_num_draft_tokens": 100,
                "max_running_requests": 10,
            },
            "1512 tokens required",
        ),
        ({"speculative_algorithm": "mtp"}, f"{512 + 48 * 4} tokens required"),
    ],
)
def test_a_budget_that_is_too_small_is_reported_beside_the_refusals(
    refusals: Refusals, settings: dict[str, Any], needed: str
) -> None:
    asked = {"moe_dispatch": "all_to_all", "max_dispatch_tokens": 511, **settings}
    errors = refusals(**asked)
    [small] = [error for error in errors if isinstance(error, BudgetTooSmall)]
    assert needed in small.what
    assert any("all_to_all" in error.what for error in errors)
    assert any("not supported" in error.what for error in errors if error is not small)
    enough = refusals(**{**asked, "max_dispatch_tokens": 4096})
    assert not [error for error in enough if isinstance(error, BudgetTooSmall)]


def test_deterministic_and_fused_finalize_contradict_each_other(refusals: Refusals) -> None:
    errors = refusals(deterministic=True, fused_finalize=True)
    assert any("contradict each other" in error.what for error in errors)


@pytest.mark.parametrize("arch", [Arch.CPU, Arch.SM90])
def test_deterministic_is_for_every_device(settle: Callable[..., Plan], arch: Arch) -> None:
    plan = settle(deterministic=True, arch=arch)
    assert plan.deterministic
    [decision] = [one for one in plan.decisions if one.field == "deterministic"]
    assert decision.value == "on"
    assert ("GPU" in decision.why) is (arch is Arch.SM90)
    assert not settle(arch=arch).deterministic


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "torch"}, {"moe_runner": "reference"}], ids=str
)
def test_on_a_gpu_deterministic_is_for_triton_alone(
    refusals: Refusals, settings: dict[str, Any]
) -> None:
    (error,) = refusals(deterministic=True, arch=Arch.SM90, **settings)
    assert isinstance(error, Unsupported)
    [(field, value)] = settings.items()
    assert f"--{field.replace('_', '-')} {value}" in error.what


def test_a_gpu_captures_as_many_sequences_as_may_run(settle: Callable[..., Plan]) -> None:
    plan = settle(arch=Arch.SM90)
    assert plan.attention == "triton"
    assert plan.graphs == GraphPlan(plan.schedule.max_running_requests, 2048)
    why = {one.field: (one.value, one.why) for one in plan.decisions}
    assert why["cuda_graphs"] == (
        "on",
        "decode, verify and short prefill steps, in 35 sizes of batch, 11 of prompts",
    )
    assert why["graph_max_batch"] == ("256", "as many as may run")
    assert settle(arch=Arch.SM90, graph_max_batch=24).graphs == GraphPlan(24, 2048)
    assert settle(arch=Arch.SM90, graph_max_batch=999).graphs == GraphPlan(256, 2048)
    short = settle(arch=Arch.SM90, chunked_prefill_size=512)
    assert short.graphs.max_prefill_tokens == 512
    assert settle(arch=Arch.SM90, graph_max_prefill_tokens=0).graphs == GraphPlan(256, 0)
    larger = settle(arch=Arch.SM90, graph_max_prefill_tokens=16384)
    assert larger.experts.budget.per_rank == 16384


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cuda_graphs": "off"}, "nothing is captured"),
        ({"moe_runner": "reference"}, "the reference runner waits for the device"),
        ({"attention_backend": "torch"}, "torch's attention is laid out by the host"),
    ],
)
def test_what_waits_for_the_host_is_not_captured(
    settle: Callable[..., Plan], refusals: Refusals, settings: dict[str, Any], why: str
) -> None:
    plan = settle(arch=Arch.SM90, **settings)
    assert plan.graphs == GraphPlan(0, 0)
    assert why in {one.why for one in plan.decisions}
    if "cuda_graphs" not in settings:
        (error,) = refusals(arch=Arch.SM90, cuda_graphs="on", **settings)
        assert error.why == why


def test_attention_is_torchs_on_a_cpu(settle: Callable[..., Plan], refusals: Refusals) -> None:
    assert settle().attention == "torch"
    (error,) = refusals(attention_backend="triton")
    assert "--attention-backend triton is not supported on the CPU" in error.what
