# SPDX-License-Identifier: Apache-2.0
"""What the device says it is."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from tetrarch.core.errors import ConfigError, Unsupported
from tetrarch.core.registry import Registry

__all__ = ["Arch", "Device", "arch_of", "detect", "usable_cores"]


class Arch(StrEnum):
    """Architectures the support table speaks of."""

    CPU = "cpu"
    SM80 = "sm80"
    SM89 = "sm89"
    SM90 = "sm90"
    SM100 = "sm100"
    SM103 = "sm103"
    SM120 = "sm120"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's device; tests make fake ones.

    Attributes:
        memory_bytes: Of the device; for a CPU, of the machine or of the container.
        physical_cores: Of the host, as far as this process may use them.
    """

    arch: Arch
    name: str
    torch_device: str  # "cpu" | "cuda"
    num_devices: int
    memory_bytes: int
    physical_cores: int


_CGROUP = Path("/sys/fs/cgroup")
# Imported on use: a command line is read, and refused, without waiting seconds for torch.
_TORCH = Registry({"cuda": "torch:cuda"})
_ARCHS = {
    (8, 0): Arch.SM80,
    (8, 6): Arch.SM80,  # same instructions as far as we use them
    (8, 7): Arch.SM80,
    (8, 9): Arch.SM89,
    (9, 0): Arch.SM90,
    (10, 0): Arch.SM100,
    (10, 3): Arch.SM103,
    (12, 0): Arch.SM120,
    (12, 1): Arch.SM120,
}


def detect(wanted: str = "auto") -> Device:
    """Return the device this machine offers.

    Args:
        wanted: `cpu`, `cuda`, or `auto` for a CUDA device where there is one.

    Raises:
        ConfigError: CUDA is wanted and there is none.
        Unsupported: The GPU is older than SM80, or of a kind we do not know.
    """
    cuda = _TORCH["cuda"]
    has_cuda: bool = cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: this machine has no CUDA device",
            why="torch.cuda.is_available() is false; the driver, or a CUDA build of torch, is "
            "missing",
            fix="--device cpu, or install PyTorch for CUDA",
        )
    if wanted == "cpu" or not has_cuda:
        return Device(
            arch=Arch.CPU,
            name=_cpu_name(),
            torch_device="cpu",
            num_devices=1,
            memory_bytes=_host_memory(_CGROUP),
            physical_cores=usable_cores(_CGROUP),
        )
    properties = cuda.get_device_properties(0)
    return Device(
        arch=arch_of((properties.major, properties.minor), properties.name),
        name=properties.name,
        torch_device="cuda",
        num_devices=cuda.device_count(),
        memory_bytes=properties.total_memory,
        physical_cores=usable_cores(_CGROUP),
    )


def arch_of(capability: tuple[int, int], name: str) -> Arch:
    """Return the architecture of a compute capability.

    Raises:
        Unsupported: The table of this file does not know it.
    """
    if capability in _ARCHS:
        return _ARCHS[capability]
    raise Unsupported(
        f"{name} (compute capability {capability[0]}.{capability[1]}) is not supported",
        why="tetrarch knows " + ", ".join(f"{major}.{minor}" for major, minor in _ARCHS),
        fix="--device cpu",
    )


def usable_cores(cgroup: Path) -> int:
    """Return the physical cores this process may use: the least of machine, affinity and quota."""
    logical = psutil.cpu_count(logical=True) or 1
    physical = psutil.cpu_count(logical=False) or logical
    # Where hyper-threads are visible, two allowed CPUs are one core.
    cores = min(physical, -(-_allowed_cpus(logical) * physical // logical))
    quota = _read(cgroup / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(cores, 1)


def _cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _allowed_cpus(logical: int) -> int:
    try:
        return len(psutil.Process().cpu_affinity() or range(logical))
    except AttributeError:  # macOS has no affinity
        return logical


def _host_memory(cgroup: Path) -> int:
    total = psutil.virtual_memory().total
    limit = _read(cgroup / "memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not in a container, or cgroup v1: no limit that we can see
        return ""
