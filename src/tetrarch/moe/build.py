# SPDX-License-Identifier: Apache-2.0
"""One expert plan becomes one expert layer."""

from __future__ import annotations

from torch import Tensor

from tetrarch.config.plan import ExpertPlan, QuantPlan
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.registry import DISPATCHERS, RUNNERS
from tetrarch.moe.types import Dispatcher, ExpertSpec, Runner

__all__ = ["build_layer"]


def build_layer(
    spec: ExpertSpec,
    experts: ExpertPlan,
    quant: QuantPlan,
    *,
    scratch: SlotTable,
    ignored: bool = False,
    arena: Arena | None = None,
) -> MoELayer:
    """Build an expert layer whose weights are allocated but not yet loaded.

    Args:
        spec: The layer's geometry on this rank.
        experts: Runner, dispatcher and budget.
        quant: The contract.
        scratch: Buffers that all layers share; buffers it lacks are added.
        ignored: The layer is named by `--fp4-ignored-layers` and runs unquantized.
        arena: Where its weights live, if they are to be released and resumed.

    Raises:
        Unsupported: The geometry or the group does not fit the runner or the dispatcher.
    """
    runner: Runner = RUNNERS[experts.route.runner](spec, experts, quant, ignored=ignored)
    dispatcher: Dispatcher = DISPATCHERS[experts.route.dispatch](spec)
    weights = SlotTable(arena)
    for name, need in runner.weight_specs().items():
        weights.allocate(name, need)
    buffers = {name: _shared(scratch, name, need) for name, need in runner.scratch_specs().items()}
    return MoELayer(spec, dispatcher=dispatcher, runner=runner, weights=weights, scratch=buffers)


def _shared(scratch: SlotTable, name: str, need: TensorSpec) -> Tensor:
    """Layers of equal geometry share a buffer; the key tells the others apart."""
    key = f"{name} {tuple(need.shape)} {need.dtype}"
    return scratch[key] if key in scratch else scratch.allocate(key, need)
