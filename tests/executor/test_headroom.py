# SPDX-License-Identifier: Apache-2.0
"""What is set aside for steps and graphs before pages are sized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tetrarch.config.plan import Plan, SpecPlan, TokenBudget
from tetrarch.executor.headroom import free_after_cleanup, step_bytes, trial_capacity
from tetrarch.executor.smoke import smoke_steps


@pytest.mark.parametrize("spec", [None, SpecPlan("mtp", 3, 4)])
def test_the_trial_has_room_for_every_smoke_step_and_no_more(
    make_plan: Callable[..., Plan], spec: SpecPlan | None
) -> None:
    plan = replace(make_plan(), spec=spec)
    capacity = trial_capacity(plan)
    large = replace(capacity, num_pages=1 << 20)
    assert smoke_steps(plan, capacity) == smoke_steps(plan, large)
    small = replace(capacity, num_pages=capacity.num_pages - 1)
    assert smoke_steps(plan, small) != smoke_steps(plan, large)


def test_the_trial_holds_no_more_sequences_than_may_run(make_plan: Callable[..., Plan]) -> None:
    """What is kept for each row has that many; a row beyond would end the GPU's process."""
    budget = TokenBudget(per_rank=2048, rows=2048, term="test")
    plan = make_plan(experts={"budget": budget}, device={"torch_device": "cuda"})
    most = plan.schedule.max_running_requests
    assert budget.per_rank > most * plan.model.context_len
    steps = smoke_steps(plan, trial_capacity(plan))
    assert max(seq.row for step in steps for seq in step.seqs) == most - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_peak_is_seen_and_given_back() -> None:
    free = free_after_cleanup()
    assert step_bytes(lambda: None) == 0
    size = 1 << 28
    assert size <= step_bytes(_taking(size)) < 2 * size
    assert abs(free_after_cleanup() - free) < 1 << 24


def _taking(size: int) -> Callable[[], None]:
    def run() -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda")

    return run
