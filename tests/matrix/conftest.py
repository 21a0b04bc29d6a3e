# SPDX-License-Identifier: Apache-2.0
"""Launches on fake hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.headers import WeightScan
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import LaunchErrors
from tetrarch.numerics.contract import SourceFormat

FAKES = (Arch.SM80, Arch.SM90, Arch.SM100, Arch.SM103, Arch.SM120, Arch.CPU)


@pytest.fixture(params=FAKES)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Each architecture that their matrix tells apart."""
    return request.param


@pytest.fixture(scope="session")
def device_of() -> Callable[[Arch], Device]:
    """Return a maker of fake devices."""
    return _device


@pytest.fixture(scope="session")
def launch(demo_facts: ModelFacts) -> Callable[..., Plan]:
    """Return a launcher: architecture, source format, settings as keywords → plan."""
    return partial(_launch, demo_facts)


@pytest.fixture(scope="session")
def refused(launch: Callable[..., Plan]) -> Callable[..., list[str]]:
    """Return what a launch is refused for, as text."""

    def run(arch: Arch, source: SourceFormat, **settings: Any) -> list[str]:
        with pytest.raises(LaunchErrors) as caught:
            launch(arch, source, **settings)
        for error in caught.value.errors:
            assert error.why
            assert error.fix
        return [str(error) for error in caught.value.errors]

    return run


def _launch(
    facts: ModelFacts,
    arch: Arch,
    source: SourceFormat,
    *,
    sizes: dict[str, int] | None = None,
    input_scales: bool | None = None,
    **settings: Any,
) -> Plan:
    serialized = source in (SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED)
    checkpoint = Checkpoint(
        path="/m",
        config={},
        source=source,
        label=source.upper(),
        dtype="bfloat16",
        quant_ignore=(),
        has_input_scales=serialized if input_scales is None else input_scales,
        kv_quant=None,
        weights=WeightScan(),
    )
    args = LaunchArgs(**({"model": "m"} | settings))
    return resolve(args, checkpoint, replace(facts, **(sizes or {})), _device(arch))


def _device(arch: Arch) -> Device:
    return Device(
        arch=arch,
        name="fake",
        torch_device="cpu" if arch is Arch.CPU else "cuda",
        num_devices=1,
        memory_bytes=1 << 36,
        physical_cores=8,
    )
