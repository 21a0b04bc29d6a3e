# SPDX-License-Identifier: Apache-2.0
"""A plan is made from headers, whatever a folder holds; `test_weights.py` carries plans out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.core.errors import CheckpointError
from tetrarch.executor.planning import Planner
from tetrarch.models.placement import place
from tetrarch.models.sources import SafetensorsSource


@pytest.mark.parametrize("atomic", [True, False])
def test_a_plan_says_where_everything_goes(
    tiny_checkpoint: Callable[..., Any], start: Callable[..., Any], atomic: bool
) -> None:
    first, second = (
        tiny_checkpoint("qwen3_moe", seed=seed, num_hidden_layers=1, num_experts=2).path
        for seed in (0, 1)
    )
    executor = start(first)
    model, plan = vars(executor)["_model"], executor.plan
    planner = Planner(model, plan)
    update = planner.plan(str(second), atomic=atomic)
    assert (update.path, update.atomic, update.source.name) == (str(second), atomic, str(second))
    assert update.seconds > 0
    source = SafetensorsSource(second)
    assert update.placements == planner.place(source) == place(model, source, plan.quant)
    with pytest.raises(CheckpointError, match="/nowhere"):
        planner.plan("/nowhere", atomic=atomic)
