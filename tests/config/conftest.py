# SPDX-License-Identifier: Apache-2.0
"""Fake machines, models and checkpoints: resolution never needs real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.headers import WeightScan
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import LaunchErrors, TetrarchError
from tetrarch.numerics.contract import SourceFormat

GIB = 1 << 30


@pytest.fixture(scope="session")
def facts() -> ModelFacts:
    """A Qwen3-30B-A3B, counted."""
    return ModelFacts(
        model_type="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        num_layers=48,
        num_moe_layers=48,
        num_experts=128,
        top_k=8,
        hidden_size=2048,
        expert_hidden_size=2048,
        expert_intermediate_size=768,
        vocab_size=151936,
        context_len=40960,
        num_dense_params=1_541_000_000,
        num_expert_params=28_991_000_000,
        kv_elements_per_token=48 * 2 * 4 * 128,
        num_mtp_layers=0,
    )


@pytest.fixture(scope="session")
def machine() -> Callable[..., Device]:
    """Return a factory of fake devices: architecture → device."""

    def make(arch: Arch = Arch.CPU, **changes: Any) -> Device:
        is_cpu = arch is Arch.CPU
        device = Device(
            arch=arch,
            name=f"a fake {arch}",
            torch_device="cpu" if is_cpu else "cuda",
            num_devices=1,
            memory_bytes=(64 if is_cpu else 141) * GIB,
            physical_cores=16,
        )
        return replace(device, **changes)

    return make


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Checkpoint]:
    """Return a factory of described checkpoints: source format → checkpoint."""

    def make(source: SourceFormat = SourceFormat.BF16, **changes: Any) -> Checkpoint:
        plain = source in (SourceFormat.BF16, SourceFormat.FP16, SourceFormat.FP32)
        described = Checkpoint(
            path="/models/some",
            config={"model_type": "qwen3_moe"},
            source=source,
            label=source.upper(),
            dtype={"fp16": "float16", "fp32": "float32"}.get(source, "bfloat16"),
            quant_ignore=(),
            has_input_scales=not plain and source is not SourceFormat.FP8_BLOCK,
            kv_quant=None,
            weights=WeightScan(),
        )
        return replace(described, **changes)

    return make


@pytest.fixture(scope="session")
def settle(
    facts: ModelFacts,
    machine: Callable[..., Device],
    checkpoint: Callable[..., Checkpoint],
) -> Callable[..., Plan]:
    """Return `resolve` with everything defaulted: settings as keywords → plan."""

    def run(
        *,
        source: SourceFormat | Checkpoint = SourceFormat.BF16,
        arch: Arch = Arch.CPU,
        model_facts: ModelFacts = facts,
        device: Device | None = None,
        **settings: Any,
    ) -> Plan:
        described = source if isinstance(source, Checkpoint) else checkpoint(source)
        args = LaunchArgs(**{"model": "some/model", **settings})
        return resolve(args, described, model_facts, device or machine(arch))

    return run


@pytest.fixture(scope="session")
def refusals(settle: Callable[..., Plan]) -> Callable[..., list[TetrarchError]]:
    """Return what `resolve` refuses: settings as keywords → its errors."""

    def run(**settings: Any) -> list[TetrarchError]:
        with pytest.raises(LaunchErrors) as caught:
            settle(**settings)
        return list(caught.value.errors)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of checkpoint folders: JSON files as keywords → folder."""

    def write(**files: Any) -> Path:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{name}.json").write_text(text)
        return tmp_path

    return write
