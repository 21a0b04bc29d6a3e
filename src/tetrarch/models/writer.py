# SPDX-License-Identifier: Apache-2.0
"""Whole weights into slots: dense ones at once, a layer's experts when all of them are there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tetrarch.config.plan import QuantPlan
from tetrarch.core.errors import CheckpointError
from tetrarch.memory.checksum import digest
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model
from tetrarch.models.destinations import Destination, ExpertDestination
from tetrarch.models.formats import StoredWeight
from tetrarch.models.parts import Parts, assemble, decode
from tetrarch.models.readback import digests_of
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.types import CanonicalExperts, Nvfp4Matrix, PlainExperts

__all__ = ["WeightWriter"]


class WeightWriter:
    """Writes one load, or one update, through a journal.

    Lives as long as that: what a failed one left behind cannot meet the next.

    Attributes:
        model: Whose slots are written.
        journal: Through which.
        digests: Of what was written, named as by `checksums`; empty unless it is to be verified.
        num_dense: Dense weights written.
        num_expert_matrices: Expert matrices taken; written with their layer.
    """

    def __init__(
        self, model: Model, plan: QuantPlan, journal: Journal, *, digests: bool = False
    ) -> None:
        """Begin; `digests` are kept where somebody will `verify` them."""
        self.model, self.journal = model, journal
        self.digests: dict[str, str] = {}
        self._keeps_digests = digests
        self.num_dense = self.num_expert_matrices = 0
        self._plan = plan
        self._stagers: dict[str, ExpertStager] = {}
        self._dense: set[str] = set()
        self._layers: set[str] = set()
        self._ready: deque[Callable[[], None]] = deque()  # writes that are due

    def take(self, weight: StoredWeight, to: Destination, parts: Parts) -> None:
        """Take one whole weight, and write what is whole with it.

        Args and errors as of `stage`.
        """
        self.stage(weight, to, parts)
        self.commit()

    def stage(self, weight: StoredWeight, to: Destination, parts: Parts) -> None:
        """Take one whole weight; what is whole with it waits for `commit`. Touches no slot.

        Args:
            weight: How it is stored.
            to: Where it goes.
            parts: Its tensors, by the last word of their names.

        Raises:
            CheckpointError: Its values cannot be weights, or it came twice.
        """
        if isinstance(to, ExpertDestination):
            self._stage(to, weight, parts)
            return
        slot = self.model.weights[to.name]
        stored = assemble(weight, parts, dtype=slot.dtype, device=slot.device)
        value = decode(stored, slot.dtype)
        _check_finite(weight.name, value)
        if self._keeps_digests:
            self.digests[to.name] = digest(value)
        self._ready.append(partial(self._write, to.name, value))

    def check(self) -> None:
        """Look at the values of layers of which only a part has come.

        Raises:
            CheckpointError: They cannot be weights.
        """
        for stager in self._stagers.values():
            stager.check()

    def commit(self) -> None:
        """Write what has been staged and is whole. Between steps only."""
        while self._ready:
            self._ready.popleft()()

    def unfinished(self) -> list[str]:
        """Return in words what the layers lack of which only a part has come."""
        return [
            f"{layer}: {part} of expert {expert}"
            for layer, stager in self._stagers.items()
            for part, expert in stager.missing() or [("a bias", "some")]
        ]

    def unwritten(self) -> list[str]:
        """Return the dense weights and expert layers that have not been written."""
        dense = [name for name in self.model.weights if name not in self._dense]
        return dense + [path for path in self.model.experts if path not in self._layers]

    def _stage(self, to: ExpertDestination, weight: StoredWeight, parts: Parts) -> None:
        layer = self.model.experts[to.layer]
        ignored = to.layer in self.model.ignored
        if to.layer not in self._stagers:
            plan = self._plan.at(to.layer)
            stager = ExpertStager(layer.spec, plan, ignored=ignored, layer=to.layer)
            self._stagers[to.layer] = stager
        stager = self._stagers[to.layer]
        # FP8 becomes BF16 before it becomes NVFP4: so the contract defines online weights.
        dtype = torch.bfloat16 if stager.packs else layer.spec.dtype
        self._put(stager, to, assemble(weight, parts, dtype=dtype, device=layer.spec.device))
        if stager.is_complete:
            experts = self._stagers.pop(to.layer).finish()
            if self._keeps_digests:
                self.digests |= digests_of(to.layer, experts)
            self._ready.append(partial(self._write_layer, to.layer, experts))

    def _write(self, name: str, value: Tensor) -> None:
        self.journal.write(self.model.weights, name, value)
        self._dense.add(name)
        self.num_dense += 1

    def _write_layer(self, path: str, experts: CanonicalExperts | PlainExperts) -> None:
        self.model.experts[path].load(experts, self.journal)
        self._layers.add(path)

    def _put(
        self, stager: ExpertStager, to: ExpertDestination, value: Tensor | Nvfp4Matrix
    ) -> None:
        if isinstance(value, Nvfp4Matrix):  # never several in one tensor: `place` refuses those
            assert to.part is not None
            assert to.expert is not None
            stager.put(to.part, to.expert, value)
            self.num_expert_matrices += 1
            return
        for part, expert, one in to.matrices(value):
            if to.bias:
                stager.put_bias(part, expert, one)
            else:
                stager.put(part, expert, one)
                self.num_expert_matrices += 1


def _check_finite(name: str, value: Tensor) -> None:
    if value.numel() and not all(math.isfinite(float(end)) for end in value.aminmax()):
        raise CheckpointError(
            f"{name} holds NaN or Inf",
            why=f"as {str(value.dtype).removeprefix('torch.')} it would spread to every token",
            fix="export the checkpoint again; float16 holds no number above 65,504",
        )
