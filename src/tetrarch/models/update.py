# SPDX-License-Identifier: Apache-2.0
"""New weights that arrive in pieces: a trainer's tensors, some in each call.

The pieces of one weight, or of one layer, may come in different calls and in any order. What is
whole is written; the rest waits, and is an error only when the sender says that it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrarch.config.plan import QuantPlan
from tetrarch.core.courtesy import gently
from tetrarch.core.errors import CheckpointError
from tetrarch.memory.checksum import digest
from tetrarch.memory.journal import Journal
from tetrarch.models.build import Model
from tetrarch.models.destinations import ExpertDestination
from tetrarch.models.faults import Fault, Faults
from tetrarch.models.formats import INPUT_SCALES
from tetrarch.models.placement import Headers, Placements, group, place_some
from tetrarch.models.readback import verify
from tetrarch.models.sources import TensorSource
from tetrarch.models.writer import WeightWriter

__all__ = ["LiveUpdate", "Pieces"]

_SENDER = "the update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The tensors of one call, checked: what is whole with them, and what still waits.

    Attributes:
        fresh: Tensors of this call that have not come before.
        placements: The weights that are whole now.
        parts: Their tensors, by name.
        waiting: The tensors of the others.
        lacking: Weight → what it still lacks, in words.
    """

    fresh: Mapping[str, Tensor]
    digests: Mapping[str, str]
    placements: Placements
    parts: Mapping[str, Tensor]
    waiting: dict[str, Tensor]
    lacking: dict[str, str]


class LiveUpdate:
    """One update, from its first tensor to its end.

    Attributes:
        digests: Of every tensor taken, by name.
        num_tensors, num_bytes: Taken so far, repetitions left out.
    """

    def __init__(self, model: Model, plan: QuantPlan, journal: Journal) -> None:
        """Begin.

        Args:
            model: Its slots are written as layers become whole.
            plan: The experts' contract.
            journal: Through which they are written.
        """
        self._model, self._plan = model, plan
        self._writer = WeightWriter(model, plan, journal, digests=True)
        self.digests: dict[str, str] = {}
        self._taken: set[str] = set()  # weights
        self._waiting: dict[str, Tensor] = {}
        self._lacking: dict[str, str] = {}
        self.num_tensors = self.num_bytes = 0

    @torch.no_grad()
    def check(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Check the tensors of one call by their names, shapes and types; take nothing.

        A tensor that came before with the same bytes is skipped: a client whose call timed out
        sends it again.

        Args:
            tensors: Under checkpoint names, on any device. Once taken they are kept until their
                layer is whole, and must not change until then.

        Raises:
            CheckpointError: Something does not fit; the update goes on as if it had not come.
        """
        digests = {name: digest(tensor) for name, tensor in gently(tensors.items())}
        fresh = {n: t for n, t in tensors.items() if self.digests.get(n) != digests[n]}
        pending = {**self._waiting, **fresh}
        weights = group(TensorSource(pending).headers)
        weights = {name: parts for name, parts in weights.items() if not self._is_late(name, parts)}
        placements, lacking = place_some(self._model, weights, self._plan, source=_SENDER)
        self._refuse_again(placements)
        placed = {n: pending[n] for one in placements.weights for n in one.weight.parts.values()}
        names = [tensor for name in lacking for tensor, _ in weights[name].values()]
        return Pieces(
            fresh=fresh,
            digests=digests,
            placements=placements,
            parts=placed,
            waiting={name: pending[name] for name in names},
            lacking=lacking,
        )

    @torch.no_grad()
    def stage(self, pieces: Pieces) -> None:
        """Quantize what was checked, as far as it is whole. Touches no slot, so steps may go on.

        Raises:
            CheckpointError: Values cannot be weights. The update is lost: go back to the old ones.
        """
        for one in gently(pieces.placements.weights):
            parts = {part: pieces.parts[name] for part, name in one.weight.parts.items()}
            self._writer.stage(one.weight, one.to, parts)
            self._taken.add(one.weight.name)
        self._writer.check()

    @torch.no_grad()
    def commit(self, pieces: Pieces) -> None:
        """Write what was staged: dense weights, and the layers that are whole now."""
        self._writer.commit()
        self._waiting, self._lacking = pieces.waiting, pieces.lacking
        self.digests.update(pieces.digests)
        self.num_tensors += len(pieces.fresh)
        self.num_bytes += sum(tensor.nbytes for tensor in pieces.fresh.values())

    def unfinished(self) -> list[str]:
        """Return in words what half-paired weights and half-complete layers still lack."""
        return [*self._lacking.values(), *self._writer.unfinished()]

    def missing(self, *, full: bool) -> list[str]:
        """Return what has not come at all of a `full` update, which must bring every weight."""
        return self._writer.unwritten() if full else []

    def check_finished(self, *, full: bool) -> None:
        """Raise if the update may not end here.

        Args:
            full: Every weight of the model must have come.

        Raises:
            CheckpointError: It names what is half-complete or missing, or what the model does not
                hold although it was written.
        """
        faults = Faults()
        for words in self.unfinished():
            faults.add(Fault.HALF_COMPLETE, words)
        for name in self.missing(full=full):
            faults.add(Fault.NOT_SENT, name)
        faults.raise_any(_SENDER)
        verify(self._model, self._writer.digests)

    def _is_late(self, name: str, parts: Headers) -> bool:
        """Whether these are input scales that their weight did not wait for."""
        return name in self._taken and set(parts) <= set(INPUT_SCALES)

    def _refuse_again(self, placements: Placements) -> None:
        """Refuse other values for an expert: its layer may be written already."""
        for one in placements.weights:
            if isinstance(one.to, ExpertDestination) and one.weight.name in self._taken:
                raise CheckpointError(
                    f"{one.weight.name} came twice, with different values",
                    why="an update brings each expert matrix once; the same bytes may be repeated",
                    fix="end this update, and begin another one for the next weights",
                )
