# SPDX-License-Identifier: Apache-2.0
"""From what was typed to a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tetrarch.config.cli import Reading, read_keywords
from tetrarch.config.hardware import Device
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import ModelFacts
from tetrarch.core.errors import CheckpointError, LaunchErrors
from tetrarch.models.describe import describe


def reading(**keywords: object) -> Reading:
    return read_keywords(keywords, {})


def test_nothing_said_serves_the_demo_model_in_nvfp4(
    machine: Callable[..., Device], demo_path: Path
) -> None:
    plan = plan_launch(reading(), describe=describe, device=machine())
    assert plan.model.path == str(demo_path)
    assert plan.quant.contract.name == "nvfp4_online/per_token"
    assert plan.experts.decoded_cache


def test_the_demo_model_named_by_its_path_is_a_bf16_model(
    machine: Callable[..., Device], demo_path: Path
) -> None:
    plan = plan_launch(reading(model=demo_path), describe=describe, device=machine())
    assert plan.quant.contract.name == "none/bf16"


def test_a_hub_name_is_fetched_and_stays_the_served_name(
    machine: Callable[..., Device], facts: ModelFacts, demo_path: Path
) -> None:
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return demo_path

    plan = plan_launch(
        reading(model="org/name"), describe=lambda _: facts, fetch=fetch, device=machine()
    )
    assert asked == ["org/name"]
    assert (plan.model.path, plan.model.served_name) == (str(demo_path), "org/name")


def test_typing_errors_and_refusals_are_reported_together(machine: Callable[..., Device]) -> None:
    said = reading(port="x", tp_size=2, pagesize=1)
    with pytest.raises(LaunchErrors) as caught:
        plan_launch(said, describe=describe, device=machine())
    text = str(caught.value)
    assert len(caught.value.errors) == 3
    assert all(part in text for part in ("port: 'x'", "--tp-size 2", "'pagesize'"))


def test_a_missing_checkpoint_does_not_hide_typing_errors(machine: Callable[..., Device]) -> None:
    with pytest.raises(LaunchErrors) as caught:
        plan_launch(reading(port="x", model="/no/such"), describe=describe, device=machine())
    assert len(caught.value.errors) == 2
    assert isinstance(caught.value.errors[1], CheckpointError)


def test_the_machine_is_asked_where_none_is_given() -> None:
    plan = plan_launch(reading(device="cpu"), describe=describe)
    assert plan.device.torch_device == "cpu"
