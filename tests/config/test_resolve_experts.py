# SPDX-License-Identifier: Apache-2.0
"""How the experts are computed, and whether decoded ones are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tetrarch.config.hardware import Arch, Device
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.core.errors import TetrarchError


def decision(plan: Plan, field: str) -> tuple[str, str]:
    (found,) = [(d.value, d.why) for d in plan.decisions if d.field == field]
    return found


def test_auto_takes_the_first_row_and_says_so(settle: Callable[..., Plan]) -> None:
    plan = settle(quantization="nvfp4_online")
    assert plan.experts.route is next(row for row in SUPPORT if Arch.CPU in row.archs)
    assert plan.experts.finalize is Finalize.SEPARATE
    value, why = decision(plan, "moe_runner")
    assert value == "reference"
    assert "nvfp4_online/per_token on cpu" in why


@pytest.mark.parametrize("arch", [Arch.SM90, Arch.SM80])
def test_a_gpu_gets_triton_and_hears_where_it_never_ran(
    settle: Callable[..., Plan], arch: Arch
) -> None:
    for quantization in ("nvfp4_online", "none"):
        value, why = decision(settle(arch=arch, quantization=quantization), "moe_runner")
        assert value == "triton"
        assert ("never run on one" in why) == (arch is Arch.SM80)
    asked = settle(arch=arch, moe_runner="triton", quantization="nvfp4_online")
    assert ("never run on one" in decision(asked, "moe_runner")[1]) == (arch is Arch.SM80)


def test_the_fused_finalize_is_planned_where_it_is_asked_for(
    settle: Callable[..., Plan], refusals: Callable[..., list[TetrarchError]]
) -> None:
    assert settle(arch=Arch.SM90).experts.finalize is Finalize.SEPARATE
    fused = settle(arch=Arch.SM90, fused_finalize=True)
    assert fused.experts.finalize is Finalize.FUSED
    (error,) = refusals(fused_finalize=True)
    assert "reference runner" in error.why
    (error,) = refusals(arch=Arch.SM90, moe_runner="reference", fused_finalize=True)
    assert "runner triton" in error.fix


def test_the_cpu_refuses_triton_by_name(refusals: Callable[..., list[TetrarchError]]) -> None:
    (error,) = refusals(moe_runner="triton")
    assert "for NVIDIA GPUs alone" in error.why
    assert "--moe-runner reference" in error.fix


def test_the_budget_says_what_dominates(settle: Callable[..., Plan]) -> None:
    plan = settle()
    value, why = decision(plan, "tokens_per_step")
    assert int(value) == plan.experts.budget.per_rank == 512 + 64
    assert plan.experts.budget.term in why


def test_decoded_experts_are_kept_where_a_quarter_of_the_memory_holds_them(
    settle: Callable[..., Plan], machine: Callable[..., Device], facts: ModelFacts
) -> None:
    need = facts.num_expert_params * 2
    for memory, kept in ((need * 4, True), (need * 4 - 1, False)):
        device = machine(memory_bytes=memory)
        plan = settle(quantization="nvfp4_online", device=device)
        assert plan.experts.decoded_cache is kept
        value, why = decision(plan, "decoded_cache")
        assert value == ("on" if kept else "off")
        assert "a quarter of" in why


@pytest.mark.parametrize("asked", ["on", "off"])
def test_the_cache_can_be_asked_for(settle: Callable[..., Plan], asked: str) -> None:
    plan = settle(quantization="nvfp4_online", decoded_cache=asked)
    assert plan.experts.decoded_cache is (asked == "on")


def test_plain_experts_have_nothing_to_decode(
    settle: Callable[..., Plan], refusals: Callable[..., list[TetrarchError]]
) -> None:
    assert not settle().experts.decoded_cache
    (error,) = refusals(decoded_cache="on")
    assert "no packed experts" in error.why
