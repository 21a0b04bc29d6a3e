# SPDX-License-Identifier: Apache-2.0
"""What the device says it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Arch", "Device"]


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
    """One rank's device; tests make fake ones."""

    arch: Arch
    name: str
    torch_device: str  # "cpu" | "cuda"
    num_devices: int
    memory_bytes: int
    physical_cores: int
