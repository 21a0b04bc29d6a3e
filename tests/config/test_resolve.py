# SPDX-License-Identifier: Apache-2.0
"""Everything is decided, with a reason, or everything wrong is said at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import ConfigError, LaunchErrors, TetrarchError
from tetrarch.core.knob import knobs
from tetrarch.numerics.contract import SourceFormat


def test_every_setting_left_on_auto_is_decided_with_a_reason(settle: Callable[..., Plan]) -> None:
    free = {"api_key", "admin_api_key", "chat_template"}  # absent is a value of these
    for plan in (
        settle(model=None),
        settle(arch=Arch.SM90),
        settle(source=SourceFormat.NVFP4_MODELOPT),
        settle(source=SourceFormat.FP8_BLOCK, chunked_prefill_size=0),
    ):
        decided = {decision.field: decision for decision in plan.decisions}
        for field in knobs(LaunchArgs):
            if field.default in (None, "auto") and field.name not in free:
                assert decided[field.name].why, field.name
                assert decided[field.name].value != "auto", field.name


def test_nothing_is_decided_twice(settle: Callable[..., Plan]) -> None:
    for plan in (settle(), settle(host="0.0.0.0", page_size=32, max_total_tokens=9999)):
        fields = [decision.field for decision in plan.decisions]
        assert len(fields) == len(set(fields))


def test_all_errors_of_a_launch_come_together(
    refusals: Callable[..., list[TetrarchError]],
) -> None:
    errors = refusals(
        context_length=1 << 20,
        served_model_name="a:b",
        tp_size=2,
        cuda_graphs="on",
        max_prefill_tokens=8,
        fp4_ignored_layers=("layers.3",),
        moe_dispatch="deepep",
        moe_runner="triton",
    )
    text = "\n".join(error.what + error.why for error in errors)
    for part in (
        "--context-length", "a:b", "--tp-size", "--cuda-graphs", "page of 16",
        "--fp4-ignored-layers", "DeepEP", "Triton",
    ):  # fmt: skip
        assert part in text
    assert len(errors) == 8


def test_what_no_contract_fits_does_not_hide_the_rest(
    refusals: Callable[..., list[TetrarchError]],
) -> None:
    """What was settled before the contract, and what the table and the budget say after it."""
    after = {"moe_dispatch": "deepep", "moe_runner": "triton", "tp_size": 2}
    wrong: list[tuple[dict[str, str], str]] = [
        ({"moe_activations": "per_token"}, "is not a contract"),
        ({"quantization": "modelopt_fp4", "moe_activations": "per_token"}, "cannot start from"),
    ]
    for settings, words in wrong:
        errors = refusals(**settings, **after)
        text = "\n".join(error.what + error.why for error in errors)
        assert all(part in text for part in (words, "--tp-size", "Triton", "one FP32 scale per"))
        assert len(errors) == 4


def test_errors_found_earlier_are_reported_with_ours(
    facts: ModelFacts,
    machine: Callable[..., Device],
    checkpoint: Callable[..., Checkpoint],
) -> None:
    earlier = ConfigError("--port: 'x'", why="w", fix="f")
    args = LaunchArgs(model="m", tp_size=2)
    with pytest.raises(LaunchErrors) as caught:
        resolve(args, checkpoint(), facts, machine(), earlier=[earlier])
    assert caught.value.errors[0] is earlier
    assert len(caught.value.errors) == 2


def test_the_same_launch_makes_the_same_plan(settle: Callable[..., Plan]) -> None:
    assert settle(quantization="nvfp4_online") == settle(quantization="nvfp4_online")
