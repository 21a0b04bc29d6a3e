# SPDX-License-Identifier: Apache-2.0
"""New weights that arrive in pieces: a trainer's tensors, some in each call.

The pieces of one weight, or of one layer, may come in different calls and in any order. What is
whole is written; the rest waits, and is an error only when the sender says that it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

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
from tetrarch.models.placement import (
    Headers,
    Placements,
    group,
    place_some,
    unused_input_scale,
)
from tetrarch.models.readback import verify
from tetrarch.models.report import LeftOut, Unused
from tetrarch.models.sources import TensorSource
from tetrarch.models.writer import WeightWriter
from tetrarch.numerics.contract import SourceFormat

__all__ = ["LiveUpdate", "Pieces"]

_SENDER = "the update"
_OTHER_VALUES = (
    "begin again with values that are finite, and scales that are positive; float16 holds no "
    "number above 65,504"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The tensors of one call, checked: what is whole with them, and what still waits.

    Attributes:
        digests: Of every tensor of this call.
        placements: The weights that are whole now; and what goes nowhere, as `unused`.
        parts: Their tensors, by name.
        waiting: The tensors of the others.
        lacking: Weight → what it still lacks, in words.
    """

    digests: Mapping[str, str]
    placements: Placements
    parts: Mapping[str, Tensor]
    waiting: dict[str, Tensor]
    lacking: dict[str, str]

    @property
    def num_used(self) -> int:
        """How many tensors of this call have a place."""
        return len(self.digests.keys() - set(chain(*self.placements.unused.values())))


class LiveUpdate:
    """One update, from its first tensor to its end.

    Attributes:
        digests: Of every tensor taken, by name.
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
        self._taken: dict[str, SourceFormat] = {}  # weight → as it came
        self._left_out = LeftOut()
        self._num_whole = self._bytes_whole = 0
        self._waiting: dict[str, Tensor] = {}
        self._lacking: dict[str, str] = {}

    @torch.no_grad()
    def check(self, tensors: Mapping[str, Tensor], unselected: Iterable[str] = ()) -> Pieces:
        """Check the tensors of one call by their names, shapes and types; take nothing.

        A tensor that came before with the same bytes is skipped: a client whose call timed out
        sends it again.

        Args:
            tensors: Under checkpoint names, on any device. Once taken they are kept until their
                layer is whole, and must not change until then.
            unselected: Names of others that came with them, and that the update does not take.

        Raises:
            CheckpointError: Something does not fit; the update goes on as if it had not come.
        """
        digests = {name: digest(tensor) for name, tensor in gently(tensors.items())}
        pending = dict(self._waiting)
        for name, tensor in tensors.items():
            if self.digests.get(name) != digests[name] or name in self._left_out:
                pending[name] = tensor
        left_out = LeftOut()
        for name in unselected:
            left_out.drop(Unused.SELECTOR, name)
        weights, placements, lacking = self._place(pending, left_out)
        self._refuse_again(placements)
        placed = {n: pending[n] for one in placements.weights for n in one.weight.parts.values()}
        names = [tensor for name in lacking for tensor, _ in weights[name].values()]
        return Pieces(
            digests=digests,
            placements=placements,
            parts=placed,
            waiting={name: pending[name] for name in names},
            lacking=lacking,
        )

    def foresee(self, announced: Mapping[str, Tensor]) -> None:
        """Check tensors that are yet to come as `check` will, but for their values.

        Args:
            announced: On `meta`. Those that came before may come again, and are not looked at.

        Raises:
            CheckpointError: Something does not fit.
        """
        new = {name: one for name, one in announced.items() if name not in self.digests}
        self._place({**self._waiting, **new}, LeftOut())

    def _place(
        self, pending: Mapping[str, Tensor], left_out: LeftOut
    ) -> tuple[Mapping[str, Headers], Placements, dict[str, str]]:
        """Return the weights, where the whole ones go, and what the others lack."""
        weights = group(TensorSource(pending).headers, left_out)
        for name in [name for name, parts in weights.items() if self._is_late(name, parts)]:
            for tensor, _ in weights.pop(name).values():
                left_out.drop(unused_input_scale(self._taken[name]), tensor)
        placements, lacking = place_some(
            self._model, weights, self._plan, left_out=left_out, source=_SENDER
        )
        return weights, placements, lacking

    @torch.no_grad()
    def stage(self, pieces: Pieces) -> None:
        """Quantize what was checked, as far as it is whole. Touches no slot, so steps may go on.

        Raises:
            CheckpointError: Values cannot be weights. The update is lost: go back to the old ones.
        """
        try:
            for one in gently(pieces.placements.weights):
                parts = {part: pieces.parts[name] for part, name in one.weight.parts.items()}
                self._writer.stage(one.weight, one.to, parts)
                self._taken[one.weight.name] = one.weight.format
            self._writer.check()
        except CheckpointError as error:  # its fix is about files
            raise CheckpointError(error.what, why=error.why, fix=_OTHER_VALUES) from error

    @torch.no_grad()
    def commit(self, pieces: Pieces) -> None:
        """Write what was staged: dense weights, and the layers that are whole now."""
        self._writer.commit()
        self._waiting, self._lacking = pieces.waiting, pieces.lacking
        self.digests.update(pieces.digests)
        for name in (*pieces.parts, *pieces.waiting):
            self._left_out.keep(name)
        self._num_whole += len(pieces.parts)
        self._bytes_whole += sum(tensor.nbytes for tensor in pieces.parts.values())
        for kind, names in pieces.placements.unused.items():
            for name in names:
                self._left_out.drop(kind, name)

    @property
    def num_tensors(self) -> int:
        """Taken so far, without repetitions and what went nowhere."""
        return self._num_whole + len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Of these tensors."""
        return self._bytes_whole + sum(tensor.nbytes for tensor in self._waiting.values())

    @property
    def unused(self) -> Mapping[Unused, tuple[str, ...]]:
        """What has come and gone nowhere, by kind."""
        return self._left_out.by_kind()

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
        faults = Faults(sent=True)
        for words in self.unfinished():
            faults.add(Fault.HALF_COMPLETE, words)
        for name in self.missing(full=full):
            faults.add(Fault.NOT_SENT, name)
        if not self.num_tensors:
            for kind, names in self.unused.items():
                for name in names:
                    faults.add(Fault.LEFT_OUT, f"{name} ({kind})")
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
