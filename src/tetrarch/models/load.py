# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into a model: source → parts → slots. The first load and a reload are one call.

One weight is whole at a time, and one layer's experts are quantized as they arrive, so that
loading needs the finished model, one packed layer and one expert's raw matrices.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import Tensor

from tetrarch.config.plan import QuantPlan
from tetrarch.core.progress import Progress
from tetrarch.models.build import Model
from tetrarch.models.faults import Fault, Faults
from tetrarch.models.formats import StoredWeight
from tetrarch.models.names import ExpertDestination
from tetrarch.models.parts import PartCollector, Parts, assemble, decode
from tetrarch.models.placement import Placements, decoded, place
from tetrarch.models.report import LoadReport
from tetrarch.models.sources import Source
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.types import Nvfp4Matrix

__all__ = ["load_weights"]


@torch.no_grad()
def load_weights(
    model: Model, source: Source, *, plan: QuantPlan, progress: Progress
) -> LoadReport:
    """Fill every weight of a model from a checkpoint, in place.

    Names, shapes, types and completeness are checked from the headers before the first write. A
    layer's experts are written when they are all there.

    Args:
        model: Built; its slots are written, never replaced.
        source: Files or live tensors.
        plan: The experts' contract.
        progress: Told in bytes.

    Returns:
        What was loaded, and what was left out by name.

    Raises:
        CheckpointError: The checkpoint does not fit (nothing was written), or a tensor's values
            cannot be weights (layers before it were).
    """
    began = time.perf_counter()
    placements = place(model, source, plan)
    names = placements.reading_order()
    num_bytes = sum(source.headers[name].num_bytes for name in names)
    writer = _Writer(model, placements, plan)
    progress.start("loading weights", num_bytes, "bytes")
    try:
        for name, tensor in source.read(names):
            writer.add(name, tensor)
            progress.advance(source.headers[name].num_bytes)
    finally:
        progress.finish()
    writer.check_finished(source.name)
    return LoadReport(
        source=source.name,
        num_tensors=len(names),
        num_bytes=num_bytes,
        num_dense=writer.num_dense,
        num_expert_matrices=writer.num_expert_matrices,
        seconds=time.perf_counter() - began,
        formats=placements.formats,
        decoded=decoded(placements, model),
        unused=placements.unused,
    )


class _Writer:
    """Takes tensors; writes dense weights at once, and a layer's experts when they are whole."""

    def __init__(self, model: Model, placements: Placements, plan: QuantPlan) -> None:
        self._model, self._plan = model, plan
        self._to = {one.weight.name: one.to for one in placements.weights}
        self._collector = PartCollector(one.weight for one in placements.weights)
        self._stagers: dict[str, ExpertStager] = {}
        self._left = Counter(
            to.layer for to in self._to.values() if isinstance(to, ExpertDestination)
        )
        self.num_dense = self.num_expert_matrices = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the source."""
        whole = self._collector.add(name, tensor)
        if whole is None:
            return
        weight, parts = whole
        to = self._to[weight.name]
        if isinstance(to, ExpertDestination):
            self._stage(to, weight, parts)
            return
        slot = self._model.weights[to.name]
        value = assemble(weight, parts, dtype=slot.dtype, device=slot.device)
        self._model.weights.write_(to.name, decode(value, slot.dtype))
        self.num_dense += 1

    def check_finished(self, source: str) -> None:
        """Raise if the source promised tensors that it did not yield."""
        faults = Faults()
        for name in self._collector.unfinished():
            faults.add(Fault.MISSING, name)
        faults.raise_any(source)

    def _stage(self, to: ExpertDestination, weight: StoredWeight, parts: Parts) -> None:
        layer = self._model.experts[to.layer]
        ignored = to.layer in self._model.ignored
        if to.layer not in self._stagers:
            stager = ExpertStager(layer.spec, self._plan, ignored=ignored, layer=to.layer)
            self._stagers[to.layer] = stager
        packs = self._plan.contract.quantizes_weights and not ignored
        # FP8 becomes BF16 before it becomes NVFP4: so the contract defines online weights.
        dtype = torch.bfloat16 if packs else layer.spec.dtype
        value = assemble(weight, parts, dtype=dtype, device=layer.spec.device)
        self._put(self._stagers[to.layer], to, value)
        self._left[to.layer] -= 1
        if not self._left[to.layer]:
            layer.load(self._stagers.pop(to.layer).finish())

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
