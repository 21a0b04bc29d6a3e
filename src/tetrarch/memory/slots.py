# SPDX-License-Identifier: Apache-2.0
"""Tensors whose address never changes.

A CUDA graph records addresses. Every tensor that a graph can reach lives here: weights, scales,
scratch, the KV pool, graph inputs. Allocation happens before capture; afterwards a slot can be
written, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from tetrarch.core.errors import AddressChanged
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena

__all__ = ["Region", "SlotTable"]


class Region(StrEnum):
    """What is released and resumed together."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "cuda_graph"


class SlotTable(Mapping[str, Tensor]):
    """Allocate once, write in place, never rebind.

    Args:
        arena: Where the slots live, if their memory is to be released and resumed.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena
        self._tensors: dict[str, Tensor] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._frozen = False

    def allocate(self, name: str, spec: TensorSpec) -> Tensor:
        """Create the tensor `name`, uninitialised, and return it.

        Raises:
            AddressChanged: The table is frozen, or the name is taken.
            MemoryRefused: The arena has no more memory.
        """
        self._require_free(name)
        return self._keep(name, spec, self._empty(spec))

    def allocate_rows(self, specs: Mapping[str, TensorSpec]) -> None:
        """Create tensors one after another in memory, so that they are the rows of one tensor.

        Args:
            specs: Alike but for the first dimension.

        Raises:
            AddressChanged, MemoryRefused: As `allocate`.
        """
        for name in specs:
            self._require_free(name)
        sizes = [spec.shape[0] for spec in specs.values()]
        some = next(iter(specs.values()))
        whole = self._empty(replace(some, shape=(sum(sizes), *some.shape[1:])))
        for (name, spec), rows in zip(specs.items(), whole.split(sizes), strict=True):
            self._keep(name, spec, rows)

    def _require_free(self, name: str) -> None:
        if self._frozen or name in self._tensors:
            raise AddressChanged(
                f"cannot allocate {name!r}",
                why="the table is frozen" if self._frozen else "the name is taken",
                fix="declare the buffer in the runner's weight_specs or scratch_specs",
            )

    def _empty(self, spec: TensorSpec) -> Tensor:
        with torch.inference_mode(mode=False):  # inference tensors reject in-place writes later
            return spec.empty() if self._arena is None else self._arena.empty(spec)

    def _keep(self, name: str, spec: TensorSpec, tensor: Tensor) -> Tensor:
        # "cuda" becomes "cuda:0" once there is a tensor; later writes are compared with that.
        self._tensors[name], self._specs[name] = tensor, replace(spec, device=tensor.device)
        return tensor

    @torch.no_grad()
    def write_(self, name: str, value: Tensor, rows: slice | None = None) -> None:
        """Copy `value` into the slot, or into some rows of its first axis.

        Raises:
            AddressChanged: `value` differs in shape, dtype or device; a copy cannot hold it.
        """
        spec, slot = self._specs[name], self._tensors[name]
        if rows is not None:
            slot = slot[rows]
            spec = replace(spec, shape=tuple(slot.shape))
        if (how := spec.mismatch(value)) is not None:
            raise AddressChanged(
                f"cannot write {name!r}",
                why=f"{how}, and captured graphs hold the old address",
                fix="restart the server; a reload must keep every shape",
            )
        slot.copy_(value)

    def freeze(self) -> None:
        """Forbid new slots. Called once, just before the first capture."""
        self._frozen = True

    def addresses(self) -> dict[str, int]:
        """Return where every slot lives; equal before and after a reload."""
        return {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(spec.num_bytes for spec in self._specs.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
