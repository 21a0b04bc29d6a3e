# SPDX-License-Identifier: Apache-2.0
"""The expert layer: dispatch, run, combine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.types import (
    CanonicalExperts,
    Dispatcher,
    ExpertSpec,
    PlainExperts,
    Routing,
    Runner,
)

__all__ = ["MoELayer"]

_GROUPS = 8  # a layer is packed in so many pieces: what packing needs beside it, a piece bounds


class MoELayer(nn.Module):
    """Stands where a Hugging Face model has its `experts` module, with the same signature.

    Contract, runner and dispatcher were chosen by `resolve`; `forward` branches on none of them.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        *,
        dispatcher: Dispatcher,
        runner: Runner,
        weights: SlotTable,
        scratch: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.spec, self.dispatcher, self.runner = spec, dispatcher, runner
        self.weights, self.scratch = weights, scratch  # weights: this layer's; scratch: shared

    def load(self, experts: CanonicalExperts | PlainExperts, journal: Journal) -> None:
        """Take new weights. The first load and every reload are this same call.

        Args:
            experts: The whole layer.
            journal: Writes the slots, and keeps the old ones where a load is to be undone.
        """
        size = max(1, self.spec.num_local_experts // _GROUPS)
        for first in range(0, self.spec.num_local_experts, size):
            some = slice(first, first + size)
            for name, packed in self.runner.pack(experts.some(some)).items():
                journal.write(self.weights, name, packed, some if packed.dim() else None)

    def canonical(self) -> CanonicalExperts | PlainExperts:
        """Return the weights in the form in which they were given; may share their memory."""
        return self.runner.unpack(self.weights)

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts: (T, H), dtype of `hidden_states`.

        Args:
            hidden_states: (T, H) in the model's dtype.
            top_k_index: (T, K) integer, global expert ids.
            top_k_weights: (T, K) floating point, normalised and scaled by the router.
        """
        routing = Routing(top_k_index.int(), top_k_weights.float())
        arrived = self.dispatcher.dispatch(hidden_states, routing)
        rows = self.runner.run(arrived, weights=self.weights, scratch=self.scratch)
        return self.dispatcher.combine(rows)
