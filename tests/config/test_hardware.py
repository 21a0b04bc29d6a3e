# SPDX-License-Identifier: Apache-2.0
"""What the machine offers, within what this process may use."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from tetrarch.config.hardware import Arch, arch_of, detect, usable_cores
from tetrarch.core.errors import ConfigError, Unsupported


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, logical: int, physical: int | None, allowed: int
) -> None:
    class Process:
        def cpu_affinity(self) -> list[int]:
            return list(range(allowed))

    counts = {True: logical, False: physical}
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: counts[logical])
    monkeypatch.setattr(psutil, "Process", Process)


def test_the_cpu_is_always_there() -> None:
    device = detect("cpu")
    assert (device.arch, device.torch_device, device.num_devices) == (Arch.CPU, "cpu", 1)
    assert device.memory_bytes > 1 << 28
    assert 1 <= device.physical_cores <= (psutil.cpu_count() or 1)
    assert device.name


def test_auto_is_the_cpu_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect("auto").arch is Arch.CPU
    with pytest.raises(ConfigError, match="no CUDA device"):
        detect("cuda")


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    device = detect()
    assert (device.arch, device.torch_device, device.num_devices) == (Arch.SM90, "cuda", 2)
    assert device.memory_bytes == 141 << 30
    assert detect("cpu").arch is Arch.CPU


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), Arch.SM80), ((8, 9), Arch.SM89), ((10, 3), Arch.SM103), ((12, 1), Arch.SM120)],
)
def test_capabilities_are_architectures(capability: tuple[int, int], arch: Arch) -> None:
    assert arch_of(capability, "a GPU") is arch


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_a_gpu_we_do_not_know_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(Unsupported, match=f"{capability[0]}.{capability[1]}"):
        arch_of(capability, "a GPU")


@pytest.mark.parametrize(
    ("machine", "quota", "cores"),
    [
        ({"logical": 16, "physical": 8, "allowed": 16}, "max 100000", 8),
        ({"logical": 16, "physical": 8, "allowed": 6}, "max 100000", 3),
        ({"logical": 8, "physical": 8, "allowed": 3}, "max 100000", 3),
        ({"logical": 64, "physical": 32, "allowed": 64}, "250000 100000", 3),
        ({"logical": 4, "physical": None, "allowed": 4}, "", 4),
        ({"logical": 2, "physical": 1, "allowed": 1}, "10000 100000", 1),
    ],
)
def test_cores_are_the_least_of_machine_affinity_and_quota(
    machine: dict[str, int],
    quota: str,
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, **machine)
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path) == cores
