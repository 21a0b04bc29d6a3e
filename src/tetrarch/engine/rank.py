# SPDX-License-Identifier: Apache-2.0
"""What an engine needs of that which computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from tetrarch.executor.capacity import Capacity
from tetrarch.executor.regions import RegionChange, RegionState
from tetrarch.executor.step import Pending, Step
from tetrarch.executor.weights import WeightStore
from tetrarch.memory.slots import Region

__all__ = ["Rank"]


class Rank(Protocol):
    """The part of `executor.executor.Executor` that an engine uses."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def capacity(self) -> Capacity:
        """The KV pool."""
        ...

    @property
    def moe_tokens_high_water(self) -> int:
        """Most rows that one forward brought to the expert layers."""
        ...

    @property
    def weights(self) -> WeightStore:
        """Checks, replaces and restores the weights, between steps."""
        ...

    @property
    def state(self) -> str:
        """`ready`, or the code of the 503 that says why no step may run."""
        ...

    @property
    def region_states(self) -> Mapping[Region, RegionState]:
        """What memory is there."""
        ...

    def launch(self, step: Step) -> Pending:
        """Start one forward, behind those in flight; the caller waits for each, in order."""
        ...

    def release(self, tags: Collection[Region], *, backup: bool | None = None) -> RegionChange:
        """Give memory back."""
        ...

    def resume(self, tags: Collection[Region]) -> RegionChange:
        """Take memory again."""
        ...
