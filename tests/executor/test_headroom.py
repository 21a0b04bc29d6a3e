# SPDX-License-Identifier: Apache-2.0
"""What is set aside for steps and graphs before pages are sized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tetrarch.config.plan import Plan, SpecPlan
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
