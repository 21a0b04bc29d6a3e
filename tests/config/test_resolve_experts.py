# SPDX-License-Identifier: Apache-2.0
"""How the experts are computed, and whether decoded ones are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tetrarch.config.hardware import Device
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.core.errors import TetrarchError


def decision(plan: Plan, field: str) -> tuple[str, str]:
    (found,) = [(d.value, d.why) for d in plan.decisions if d.field == field]
    return found


def test_auto_takes_the_first_row_and_says_so(settle: Callable[..., Plan]) -> None:
    plan = settle(quantization="nvfp4_online")
    assert plan.experts.route is SUPPORT[0]
    assert plan.experts.finalize is Finalize.SEPARATE
    value, why = decision(plan, "moe_runner")
    assert value == "reference"
    assert "nvfp4_online/per_token on cpu" in why


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
