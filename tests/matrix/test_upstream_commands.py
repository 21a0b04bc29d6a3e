# SPDX-License-Identifier: Apache-2.0
"""The rows of SGLang's start-up matrix that are about a flag or a variable, as command lines.

What has no counterpart here is an unknown flag, and what is refused beside it is said as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tetrarch.config.cli import LaunchParser, add_launch_arguments, read_command_line
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.core.errors import LaunchErrors


@dataclass(frozen=True)
class Command:
    """One row: what they do, the launch, and parts of our refusal."""

    theirs: str
    line: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)


COMMANDS = [
    *(
        Command(
            f"{runner}: shared-expert fusion -> off, with a warning",
            f"--moe-runner-backend {runner} --disable-shared-experts-fusion",
            (f"x {runner}", "'--disable-shared-experts-fusion'"),
        )
        for runner in ("flashinfer_cutedsl", "flashinfer_trtllm", "flashinfer_trtllm_routed")
    ),
    Command(
        "EPLB + cutedsl without A2A -> error",
        "--moe-runner-backend flashinfer_cutedsl --moe-a2a-backend none --enable-eplb",
        ("x flashinfer_cutedsl x all_gather", "'--enable-eplb'"),
    ),
    Command(
        "cutedsl + deepep, mode normal -> ValueError",
        "--moe-runner-backend flashinfer_cutedsl --moe-a2a-backend deepep --deepep-mode normal",
        ("x flashinfer_cutedsl x deepep", "must travel in BF16", "'--deepep-mode'"),
    ),
    Command(
        "deepep normal -> prefill and decode graphs off",
        "--moe-a2a-backend deepep --deepep-mode normal --cuda-graphs on",
        ("x deepep", "'--deepep-mode'"),
    ),
    Command(
        "online, auto, A2A megamoe, W4A16 variable -> flashinfer_megamoe",
        "--quantization nvfp4_online --moe-a2a-backend megamoe",
        ("nvfp4_online/bf16 x megamoe",),
        {"SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16": "1"},
    ),
    Command(
        "online, flashinfer_megamoe without A2A megamoe -> ValueError",
        "--quantization nvfp4_online --moe-runner-backend flashinfer_megamoe",
        ("nvfp4_online/per_token x flashinfer_megamoe",),
    ),
    Command(
        "dispatch type given, runner trtllm -> trtllm_routed",
        "--moe-runner-backend flashinfer_trtllm --moe-wire nvfp4",
        ("x flashinfer_trtllm x NVFP4 wire", "only FlashInfer's CuTe DSL", "never travel"),
    ),
    Command(
        "dispatch type and its variable -> ValueError",
        "--moe-a2a-backend flashinfer --moe-wire bf16",
        ("SGLANG_MOE_NVFP4_DISPATCH", "--moe-wire=bf16", "disagree", "all-to-all dispatcher"),
        {"SGLANG_MOE_NVFP4_DISPATCH": "1"},
    ),
    Command(
        "flashinfer A2A + the dispatch budget's variable too small -> ValueError",
        "--moe-a2a-backend flashinfer",
        ("--max-dispatch-tokens 1", "all-to-all dispatcher"),
        {"SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "1"},
    ),
    Command(
        "draft runner unset -> the target's; of a megamoe target trtllm",
        "--moe-runner-backend flashinfer_megamoe --speculative-algorithm NEXTN",
        ("x flashinfer_megamoe",),
    ),
    Command(
        "deterministic -> fused finalize off",
        "--enable-deterministic-inference",
        ("contradict each other",),
        {"SGLANG_FLASHINFER_MOE_FUSED_FINALIZE": "1"},
    ),
]

Start = Callable[..., Plan]


@pytest.fixture(scope="session")
def start(demo_facts: ModelFacts) -> Start:
    """Return a launcher of the demo model: command line, environment, device → plan."""

    def run(line: str, environ: dict[str, str], device: Device | None = None) -> Plan:
        parser = LaunchParser()
        add_launch_arguments(parser)
        reading = read_command_line(parser, line.split(), environ)
        return plan_launch(reading, describe=lambda _: demo_facts, device=device)

    return run


def told(start: Start, *arguments: object) -> str:
    with pytest.raises(LaunchErrors) as caught:
        start(*arguments)
    return "\n".join(str(error) for error in caught.value.errors)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.theirs)
def test_every_row_about_a_flag_has_an_answer(
    start: Start, device_of: Callable[[Arch], Device], command: Command, arch: Arch
) -> None:
    text = told(start, command.line, command.environ, device_of(arch))
    assert all(words in text for words in command.words), text
    assert start("", {}, device_of(arch)).experts.route.archs >= {arch}  # without it, all is well


def test_a_gpu_without_a_row_is_refused_before_a_runner_is_chosen(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs: modelopt_fp4, runner auto, SM110 -> flashinfer_cutlass."""

    class Thor:
        name, major, minor, total_memory = "NVIDIA Thor", 11, 0, 128 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Thor())
    text = told(start, "--quantization modelopt_fp4", {})
    assert "compute capability 11.0" in text
    assert "--device cpu" in text
    assert start("--quantization modelopt_fp4 --device cpu", {}).device.arch is Arch.CPU
