# SPDX-License-Identifier: Apache-2.0
"""The plan goes to other processes whole, and keeps its secrets."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest

from tetrarch.config.plan import Plan

CHILD = """
import pickle, sys
plan = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps((plan, plan.quant.ignores("model.layers.3.mlp.experts"))))
"""


def test_a_child_process_receives_the_same_plan(settle: Callable[..., Plan]) -> None:
    plan = settle(quantization="nvfp4_online", fp4_ignored_layers=("layers.3",))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=pickle.dumps(plan), capture_output=True, check=True
    )
    received, ignores = pickle.loads(done.stdout)
    assert received == plan
    assert ignores


def test_a_plan_is_frozen_to_the_bottom(settle: Callable[..., Plan]) -> None:
    def frozen(value: object) -> None:
        if isinstance(value, list | dict | set):
            raise AssertionError(f"{value!r} can be changed")
        if dataclasses.is_dataclass(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, dataclasses.fields(value)[0].name, None)
            for each in dataclasses.fields(value):
                frozen(getattr(value, each.name))
        elif isinstance(value, tuple):
            for item in value:
                frozen(item)

    plan = settle()
    frozen(plan)
    assert hash(plan)


def test_nothing_is_left_on_auto(settle: Callable[..., Plan]) -> None:
    assert "'auto'" not in repr(settle())


def test_a_plan_that_is_printed_shows_no_key(settle: Callable[..., Plan]) -> None:
    plan = settle(api_key="sesame", admin_api_key="simsim")
    assert plan.serve.api_key == "sesame"
    assert "sesame" not in repr(plan)
    assert "simsim" not in repr(plan)
