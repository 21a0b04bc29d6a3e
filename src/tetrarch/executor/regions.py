# SPDX-License-Identifier: Apache-2.0
"""Which of the executor's memory is there: released and resumed by region.

Whether anything still needs a region, and what may run while one is gone, is the engine's to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from tetrarch.config.plan import MemoryPlan
from tetrarch.memory.arena import Arena, HostArena
from tetrarch.memory.saver import FixedArena, SaverArena, load_saver
from tetrarch.memory.slots import Region

__all__ = ["RegionChange", "RegionState", "Regions"]

# Fixed, so that every rank does the same in whatever order a client names regions.
_RESUME_ORDER = (Region.GRAPHS, Region.WEIGHTS, Region.KV_CACHE)
_RELEASE_ORDER = (Region.KV_CACHE, Region.WEIGHTS, Region.GRAPHS)


class RegionState(StrEnum):
    """Whether there is memory behind a region's addresses."""

    RESIDENT = "resident"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class RegionChange:
    """What one release or resume did.

    Attributes:
        num_bytes: Of every region asked for, as far as this call moved it.
        already: Regions that were as wanted before.
    """

    num_bytes: Mapping[Region, int]
    already: tuple[Region, ...]


class Regions:
    """Owns the arena of every region.

    On a CPU graphs have no memory; their region changes state like the others.

    Args:
        memory: Whether GPU memory can be released, and whether weights are kept meanwhile.
        device: Where the executor computes.

    Raises:
        ConfigError: A GPU's memory is to be releasable and torch_memory_saver is not installed.
    """

    def __init__(self, memory: MemoryPlan, device: torch.device) -> None:
        backups = {
            Region.WEIGHTS: memory.weights_backup,
            Region.KV_CACHE: False,
            Region.GRAPHS: True,  # nobody could write them again
        }
        self._arenas: dict[Region, Arena] = {
            region: _build_arena(region, device, saver=memory.saver, backup=backup)
            for region, backup in backups.items()
        }

    def __getitem__(self, region: Region) -> Arena:
        return self._arenas[region]

    @property
    def states(self) -> dict[Region, RegionState]:
        """Every region's state."""
        return {
            region: RegionState.RELEASED if arena.is_released else RegionState.RESIDENT
            for region, arena in self._arenas.items()
        }

    def release(self, tags: Collection[Region], *, backup: bool) -> RegionChange:
        """Give memory back. Keys and values are lost.

        Args:
            tags: Which regions.
            backup: Whether the weights are kept, so that `resume` brings them back.

        Raises:
            ConfigError: This memory cannot be released or kept; nothing was released.
            MemoryRefused: There is no room to keep the weights; nothing was released.
        """
        due = [tag for tag in _RELEASE_ORDER if tag in tags and not self._arenas[tag].is_released]
        if backup and Region.WEIGHTS in due:
            self._arenas[Region.WEIGHTS].keep()
        return self._change(tags, {tag: self._arenas[tag].release() for tag in due})

    def resume(self, tags: Collection[Region]) -> RegionChange:
        """Take memory again, at the same addresses.

        Raises:
            MemoryRefused: The weights that were kept cannot be read; they stay released.
        """
        moved: dict[Region, int] = {}
        for tag in _RESUME_ORDER:
            arena = self._arenas[tag]
            if tag in tags and arena.is_released:
                arena.resume()
                moved[tag] = arena.num_bytes
        return self._change(tags, moved)

    @staticmethod
    def _change(tags: Collection[Region], moved: Mapping[Region, int]) -> RegionChange:
        asked = [tag for tag in Region if tag in tags]
        return RegionChange(
            num_bytes={tag: moved.get(tag, 0) for tag in asked},
            already=tuple(tag for tag in asked if tag not in moved),
        )


def _build_arena(region: Region, device: torch.device, *, saver: bool, backup: bool) -> Arena:
    if device.type == "cpu":
        return HostArena()
    return SaverArena(load_saver(), tag=region, backup=backup) if saver else FixedArena()
