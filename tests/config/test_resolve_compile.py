# SPDX-License-Identifier: Apache-2.0
"""Layers are compiled on a GPU, for families that tests have compiled, unless told otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tetrarch.config.hardware import Arch
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve_compile import COMPILED_FAMILIES
from tetrarch.core.errors import TetrarchError

TESTS = Path(__file__).parents[1] / "models" / "test_compiled.py"


def reason(plan: Plan) -> str:
    (why,) = [d.why for d in plan.decisions if d.field == "torch_compile"]
    return why


@pytest.mark.parametrize(
    ("arch", "settings", "compiles", "why"),
    [
        (Arch.SM90, {}, True, "kernels"),
        (Arch.CPU, {}, False, "CPU"),
        (Arch.CPU, {"torch_compile": "on"}, True, "asked"),
        (Arch.SM90, {"torch_compile": "off"}, False, "asked"),
    ],
)
def test_where_it_pays(
    settle: Callable[..., Plan], arch: Arch, settings: dict[str, Any], compiles: bool, why: str
) -> None:
    plan = settle(arch=arch, **settings)
    assert plan.compiles_layers is compiles
    assert why in reason(plan)


def test_a_family_that_nobody_compiled_runs_eager_and_explain_names_it(
    settle: Callable[..., Plan], facts: ModelFacts
) -> None:
    other = replace(facts, model_type="hunyuan_v1_moe")
    plan = settle(arch=Arch.SM90, model_facts=other)
    assert not plan.compiles_layers
    assert "hunyuan_v1_moe" in reason(plan)
    assert settle(arch=Arch.SM90, model_facts=other, torch_compile="on").compiles_layers


def test_it_contradicts_determinism(
    refusals: Callable[..., list[TetrarchError]], settle: Callable[..., Plan]
) -> None:
    (error,) = refusals(deterministic=True, torch_compile="on")
    assert "contradict" in error.what
    assert not settle(deterministic=True).compiles_layers


def test_the_families_are_those_that_the_tests_compile() -> None:
    spec = importlib.util.spec_from_file_location(TESTS.stem, TESTS)
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    assert set(tests.KINDS) == COMPILED_FAMILIES
