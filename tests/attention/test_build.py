# SPDX-License-Identifier: Apache-2.0
"""Who computes attention, and how large its steps may be, follows from the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tetrarch.attention.backends import REFERENCE, ROW_INVARIANT, LargestStep
from tetrarch.attention.build import build_attention, largest_step
from tetrarch.config.plan import Plan, SpecPlan, TokenBudget
from tetrarch.memory.slots import SlotTable


def test_torch_attends_on_a_cpu(make_plan: Callable[..., Plan], demo_path: Path) -> None:
    plan, table = make_plan(demo_path), SlotTable()
    cpu = torch.device("cpu")
    assert build_attention((), plan, device=cpu, scratch=table) is REFERENCE
    fixed = replace(plan, deterministic=True)
    assert build_attention((), fixed, device=cpu, scratch=table) is ROW_INVARIANT
    planned_for_a_gpu = replace(
        plan, attention="triton", device=replace(plan.device, torch_device="cuda")
    )
    assert build_attention((), planned_for_a_gpu, device=cpu, scratch=table) is REFERENCE
    assert not table


def test_the_largest_step_counts_drafts_padding_and_smoke_steps(
    make_plan: Callable[..., Plan], demo_path: Path
) -> None:
    budget = TokenBudget(per_rank=640, rows=640, term="test")
    plan = make_plan(demo_path, model={"context_len": 64}, experts={"budget": budget})
    assert largest_step(plan) == LargestStep(num_seqs=17, short_q_len=1, context_len=64)
    drafted = replace(plan, spec=SpecPlan("mtp", 3, 4))
    assert largest_step(drafted) == LargestStep(num_seqs=17, short_q_len=4, context_len=64)
    few = replace(plan, schedule=replace(plan.schedule, max_running_requests=2))
    assert largest_step(few).num_seqs == 11, "ten whole contexts and a rest, side by side"
