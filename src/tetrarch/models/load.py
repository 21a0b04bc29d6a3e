# SPDX-License-Identifier: Apache-2.0
"""A checkpoint into a model: source → parts → slots. The first load and a reload are one call.

One weight is whole at a time, and one layer's experts are quantized as they arrive, so that
loading needs the finished model, one packed layer and one expert's raw matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from tetrarch.config.plan import Plan, QuantPlan
from tetrarch.core.progress import Progress
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model
from tetrarch.models.destinations import DenseDestination
from tetrarch.models.dummy import make_weights
from tetrarch.models.faults import Fault, Faults
from tetrarch.models.formats import QUANTIZED_FORMATS
from tetrarch.models.parts import PartCollector
from tetrarch.models.placement import Placements, place
from tetrarch.models.readback import verify
from tetrarch.models.report import Decoded, LoadReport
from tetrarch.models.sources import Source, open_checkpoint
from tetrarch.models.tied import check_tied
from tetrarch.models.writer import WeightWriter
from tetrarch.numerics.contract import SourceFormat

__all__ = ["fill", "first_load", "load_weights"]


def first_load(
    model: Model,
    plan: Plan,
    progress: Progress,
    *,
    place: Callable[[Source], Placements] | None = None,
) -> LoadReport:
    """Fill a new model as its plan says: from the plan's checkpoint, or with random numbers.

    What it needed of the device on the way is given back: the KV cache is sized by what is free.

    Args:
        model: Built from the plan.
        plan: Where weights come from, and what the experts are to be.
        progress: Told how far it has come.
        place: Instead of `place`, where its results are remembered.

    Raises:
        CheckpointError: As of `load_weights`, or there are no weights.
    """
    try:
        if plan.model.load_format == "dummy":
            return make_weights(model, plan.quant, progress=progress)
        source = open_checkpoint(plan, plan.model.path)
        placed = None if place is None else place(source)
        return load_weights(model, source, plan=plan.quant, progress=progress, placements=placed)
    finally:
        torch.cuda.empty_cache()  # nothing where CUDA is not in use


def load_weights(
    model: Model,
    source: Source,
    *,
    plan: QuantPlan,
    progress: Progress,
    placements: Placements | None = None,
) -> LoadReport:
    """Fill every weight of a new model from a checkpoint.

    Args:
        model: Built; its slots are written, never replaced.
        source: Files or live tensors.
        plan: The experts' contract.
        progress: Told in bytes.
        placements: What `place` says of the source, where that is known.

    Returns:
        What was loaded, and what was left out by name.

    Raises:
        CheckpointError: The checkpoint does not fit (nothing was written), or a tensor's values
            cannot be weights (layers before it were).
    """
    placements = placements or place(model, source, plan)
    writer = WeightWriter(model, plan, Journal(keeps=False))
    return fill(writer, source, placements, progress=progress)


@torch.no_grad()
def fill(
    writer: WeightWriter, source: Source, placements: Placements, *, progress: Progress
) -> LoadReport:
    """Write a whole checkpoint, placed before (`place`), in place.

    A layer's experts are written when they are all there.

    Args:
        writer: New; its journal decides whether the writes can be taken back.
        source: What was placed.
        placements: Where its tensors go.
        progress: Told in bytes.

    Raises:
        CheckpointError: A tensor's values cannot be weights, or the source does not yield what
            its headers promised. Layers before it were written.
    """
    began = time.perf_counter()
    names = placements.reading_order()
    num_bytes = sum(source.headers[name].num_bytes for name in names)
    check_tied(writer.model, source, placements)
    progress.start("loading weights", num_bytes, "bytes")
    try:
        unfinished = _write(writer, source, placements, names=names, progress=progress)
    finally:
        progress.finish()
    faults = Faults()
    for name in unfinished:
        faults.add(Fault.MISSING, name)
    faults.raise_any(source.name)
    if writer.digests:
        verify(writer.model, writer.digests)
    return LoadReport(
        source=source.name,
        num_tensors=len(names),
        num_bytes=num_bytes,
        num_dense=writer.num_dense,
        num_expert_matrices=writer.num_expert_matrices,
        seconds=time.perf_counter() - began,
        formats=placements.formats,
        decoded=_decoded(placements, writer.model),
        unused=placements.unused,
    )


def _write(
    writer: WeightWriter,
    source: Source,
    placements: Placements,
    *,
    names: Sequence[str],
    progress: Progress,
) -> list[str]:
    """Write tensor by tensor; return in words what lacked a part in the end."""
    to = {one.weight.name: one.to for one in placements.weights}
    collector = PartCollector(one.weight for one in placements.weights)
    for name, tensor in source.read(names):
        if (whole := collector.add(name, tensor)) is not None:
            weight, parts = whole
            writer.take(weight, to[weight.name], parts)
            del parts
        del tensor, whole  # a source may read ahead: none should outlive its turn
        progress.advance(source.headers[name].num_bytes)
    return collector.unfinished() or writer.unfinished()


def _decoded(placements: Placements, model: Model) -> tuple[Decoded, ...]:
    """Return what decoding quantized dense weights costs, by format."""
    sizes: dict[SourceFormat, list[tuple[int, int]]] = {}
    for one in placements.weights:
        if isinstance(one.to, DenseDestination) and one.weight.format in QUANTIZED_FORMATS:
            slot = model.weights[one.to.name]
            sizes.setdefault(one.weight.format, []).append((one.weight.num_bytes, slot.nbytes))
    return tuple(
        Decoded(
            format=form,
            num_weights=len(pairs),
            stored_bytes=sum(stored for stored, _ in pairs),
            decoded_bytes=sum(after for _, after in pairs),
        )
        for form, pairs in sizes.items()
    )
