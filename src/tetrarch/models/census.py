# SPDX-License-Identifier: Apache-2.0
"""Count the experts of a checkpoint: which are there, which are not, and how they are stored."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from tetrarch.config.drafts import DRAFT
from tetrarch.core.errors import CheckpointError
from tetrarch.models.destinations import ExpertDestination
from tetrarch.models.formats import NVFP4_FORMATS
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import ExpertSpec, Part
from tetrarch.numerics.contract import QuantContract, SourceFormat

__all__ = ["ExpertCensus"]

_Kind = tuple[str, Part, bool]  # experts module, part, bias


class ExpertCensus:
    """All experts of all layers, of every rank: a checkpoint is whole or it is refused."""

    def __init__(
        self,
        layers: Mapping[str, MoELayer],
        contracts: Mapping[str, QuantContract],
    ) -> None:
        """Expect every matrix and bias of these layers; those without a contract run as stored."""
        self._specs: dict[str, ExpertSpec] = {path: layer.spec for path, layer in layers.items()}
        self._contracts = contracts
        self._claims: dict[_Kind, dict[int, str]] = {
            (path, part, bias): {}
            for path, spec in self._specs.items()
            for part in spec.parts
            for bias in ((False, True) if spec.has_bias else (False,))
        }
        self._formats: dict[str, Counter[SourceFormat]] = {path: Counter() for path in layers}

    def claim(self, to: ExpertDestination, name: str) -> str | None:
        """Note that `name` fills a destination; return what had filled it before."""
        other = None
        for part, expert in itertools.product(self._parts(to), self._experts(to)):
            claims = self._claims[to.layer, part, to.bias]
            other = claims.get(expert, other)
            claims[expert] = name
        return other

    def note_format(self, to: ExpertDestination, form: SourceFormat) -> None:
        """Note how a matrix is stored; biases follow no contract."""
        if not to.bias:
            self._formats[to.layer][form] += 1

    def shape(self, to: ExpertDestination) -> tuple[int, ...]:
        """Return the shape that a tensor for this destination must have."""
        spec = self._specs[to.layer]
        shapes = [spec.shape_of(part) for part in self._parts(to)]
        shape = (sum(rows for rows, _ in shapes), shapes[0][1])
        one = shape[:1] if to.bias else shape[::-1] if to.transposed else shape
        return one if to.expert is not None else (spec.num_experts, *one)

    def is_local(self, to: ExpertDestination) -> bool:
        """Whether any of a tensor belongs to this rank."""
        spec = self._specs[to.layer]
        return to.expert is None or 0 <= to.expert - spec.first_local_expert < (
            spec.num_local_experts
        )

    def missing(self) -> Iterator[str]:
        """Yield names of what nothing has filled, spelled like their neighbours."""
        for (layer, part, bias), claims in self._claims.items():
            for expert in range(self._specs[layer].num_experts):
                if expert not in claims:
                    yield _spell(claims, expert) or (
                        f"{layer} expert {expert} {part}{' bias' if bias else ''}"
                    )

    def mixed(self) -> Iterator[str]:
        """Yield in words which layers mix formats that do not go together."""
        for layer, counts in self._formats.items():
            if len(counts) > 1:
                yield f"{layer}: mixed, {_tally(counts)}"
        bound = Counter(
            form
            for layer, form in self.formats().items()
            if layer in self._contracts and not layer.startswith(DRAFT)
        )
        if len(bound) > 1 and bound.keys() & NVFP4_FORMATS:
            yield f"expert layers: mixed, {_tally(bound)}; exempt some by --fp4-ignored-layers"

    def formats(self) -> dict[str, SourceFormat]:
        """Return how each layer's matrices are stored; the first format where they are mixed."""
        return {layer: next(iter(counts)) for layer, counts in self._formats.items() if counts}

    def check_contract(self) -> None:
        """Raise where the contract cannot start from what is stored.

        Raises:
            CheckpointError: It names a layer, its format and the formats the contract takes.
        """
        for layer, form in self.formats().items():
            contract = self._contracts.get(layer)
            if contract is None or form in contract.sources:
                continue
            serialized = form in NVFP4_FORMATS
            raise CheckpointError(
                f"{contract.name} cannot start from experts stored as {form}",
                why=f"{layer} is; it takes {', '.join(sorted(contract.sources))}",
                fix=f"--quantization {'modelopt_fp4' if serialized else 'nvfp4_online'}",
            )

    def _parts(self, to: ExpertDestination) -> tuple[Part, ...]:
        return (Part.GATE, Part.UP) if to.part is None else (to.part,)

    def _experts(self, to: ExpertDestination) -> range | tuple[int]:
        return range(self._specs[to.layer].num_experts) if to.expert is None else (to.expert,)


def _spell(claims: Mapping[int, str], expert: int) -> str | None:
    """Put another expert's number into the name of one that is there."""
    for other, name in claims.items():
        before, number, after = name.rpartition(f".{other}.")
        if number:
            return f"{before}.{expert}.{after}"
    return None


def _tally(counts: Mapping[SourceFormat, int]) -> str:
    return " and ".join(f"{count} {form}" for form, count in sorted(counts.items()))
