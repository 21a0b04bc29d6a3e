# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's tensor may go: a dense parameter, or a matrix of one expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tetrarch.moe.types import Part

__all__ = ["DenseDestination", "Destination", "ExpertDestination"]


@dataclass(frozen=True, slots=True)
class DenseDestination:
    """A parameter or persistent buffer outside the experts."""

    name: str  # as in `Model.weights`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDestination:
    """One expert's matrix, or the stack of a whole layer's.

    Attributes:
        layer: Path of the experts module, the key of `Model.experts`.
        part: `None`: gate and up in one tensor.
        expert: Global id; `None`: all experts, stacked along dimension 0.
        bias: A bias vector rather than a matrix.
        transposed: A stack stored as (K, N) rather than (N, K).
        interleaved: Gate and up alternate row by row; otherwise gate comes before up.
    """

    layer: str
    part: Part | None
    expert: int | None
    bias: bool = False
    transposed: bool = False
    interleaved: bool = False

    @property
    def fused(self) -> bool:
        """Whether the tensor holds more than one matrix."""
        return self.part is None or self.expert is None

    def matrices(self, value: Tensor) -> Iterator[tuple[Part, int, Tensor]]:
        """Split a tensor into what an expert stager takes: (part, expert id, (N, K) or (N,))."""
        if self.expert is None:
            for expert, one in enumerate(value):
                yield from self._parts(expert, one)
        else:
            yield from self._parts(self.expert, value)

    def _parts(self, expert: int, value: Tensor) -> Iterator[tuple[Part, int, Tensor]]:
        rows = value.T if self.transposed and not self.bias else value
        if self.part is not None:
            yield self.part, expert, rows
            return
        half = rows.shape[0] // 2
        gate, up = (rows[::2], rows[1::2]) if self.interleaved else (rows[:half], rows[half:])
        yield Part.GATE, expert, gate
        yield Part.UP, expert, up


Destination = DenseDestination | ExpertDestination
