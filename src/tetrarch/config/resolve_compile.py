# SPDX-License-Identifier: Apache-2.0
"""Settle whether decoder layers run through `torch.compile`."""

from __future__ import annotations

from tetrarch.config.args import LaunchArgs
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.plan import ModelFacts
from tetrarch.core.errors import ConfigError

__all__ = ["COMPILED_FAMILIES", "resolve_compile"]

# Whose layers are compiled in one piece by tests/models/test_compiled.py.
COMPILED_FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
    }
)


def resolve_compile(
    args: LaunchArgs, facts: ModelFacts, device: Device, ledger: Ledger, *, deterministic: bool
) -> bool:
    """Settle it. `on` compiles whatever the model, and fails to start where that is impossible."""
    if args.torch_compile == "on" and deterministic:
        ledger.refuse(
            ConfigError(
                "--torch-compile on and --deterministic contradict each other",
                why="the compiler chooses how to sum by the number of tokens in a step",
                fix="leave one of the two out",
            )
        )
    if args.torch_compile != "auto":
        ledger.decide("torch_compile", args.torch_compile, ASKED)
        return args.torch_compile == "on"
    if why := _why_not(facts, device, deterministic=deterministic):
        ledger.decide("torch_compile", "off", why)
        return False
    ledger.decide("torch_compile", "on", "a third of the kernels around experts and attention")
    return True


def _why_not(facts: ModelFacts, device: Device, *, deterministic: bool) -> str:
    if device.arch is Arch.CPU:
        return "on a CPU it costs a minute at start and saves little"
    if deterministic:
        return "--deterministic fixes how every operation sums"
    if facts.model_type not in COMPILED_FAMILIES:
        return f"nobody has compiled the layers of {facts.model_type}; on tries it"
    return ""
