# SPDX-License-Identifier: Apache-2.0
"""What a load did: counts, and everything that was left out by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tetrarch.core.units import format_bytes
from tetrarch.models.sources import reading_order
from tetrarch.numerics.contract import SourceFormat

__all__ = ["Decoded", "LeftOut", "LoadReport", "Unused"]


class Unused(StrEnum):
    """Why a known tensor of a checkpoint is not loaded. A tensor of no such kind is an error."""

    MTP = "mtp"  # draft layers: all of them while speculation is off, else all but the first
    DRAFT_COPY = "draft_copy"  # a draft's copy of the embedding or the head, which it shares
    ROTARY = "rotary"  # inv_freq, which follows from the config
    TIED = "tied"  # a second copy of the embedding
    KV_SCALE = "kv_scale"  # k_scale and v_scale: our KV pages are not quantized
    FP8_INPUT_SCALE = "fp8_input_scale"  # FP8 weights are decoded; no input is rounded to FP8
    NVFP4_INPUT_SCALE = "nvfp4_input_scale"  # of dense linears, or the contract's is dynamic
    SELECTOR = "selector"  # of the target or of the draft, where an update takes the other only


class LeftOut:
    """Tensors that go nowhere, noted one by one."""

    def __init__(self) -> None:
        self._names: dict[Unused, dict[str, None]] = {}

    def drop(self, kind: Unused, tensor: str) -> None:
        """Note one; a second time changes nothing."""
        self._names.setdefault(kind, {})[tensor] = None

    def keep(self, tensor: str) -> None:
        """Forget that it was noted: it has found a place."""
        for names in self._names.values():
            names.pop(tensor, None)

    def __contains__(self, tensor: str) -> bool:
        return any(tensor in names for names in self._names.values())

    def by_kind(self) -> dict[Unused, tuple[str, ...]]:
        """Return their names."""
        listed = {kind: tuple(reading_order(names)) for kind, names in self._names.items()}
        return {kind: names for kind, names in listed.items() if names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Dense weights that a checkpoint keeps quantized and the model computes with decoded."""

    format: SourceFormat
    num_weights: int
    stored_bytes: int
    decoded_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_weights} dense weights stored as {self.format} are decoded: "
            f"{format_bytes(self.stored_bytes)} become {format_bytes(self.decoded_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of one load, the first or a reload."""

    source: str
    num_tensors: int  # read
    num_bytes: int  # read, as stored
    num_dense: int  # dense weights written
    num_expert_matrices: int  # of this rank's experts
    seconds: float
    formats: Mapping[str, SourceFormat]  # experts module → how its matrices were stored
    decoded: tuple[Decoded, ...]
    unused: Mapping[Unused, tuple[str, ...]]  # names, by kind

    def lines(self) -> list[str]:
        """Return the report for a log, one fact a line."""
        rate = format_bytes(round(self.num_bytes / max(self.seconds, 1e-9)))
        counts = Counter(self.formats.values())
        layers = ", ".join(f"{count} layers of {form}" for form, count in counts.items())
        return [
            f"loaded {self.num_tensors} tensors, {format_bytes(self.num_bytes)} "
            f"in {self.seconds:.1f} s ({rate}/s) from {self.source}",
            f"{self.num_expert_matrices} expert matrices ({layers or 'no expert layers'}), "
            f"{self.num_dense} dense weights",
            *(str(decoded) for decoded in self.decoded),
            *(f"not loaded: {len(names)} of kind {kind}" for kind, names in self.unused.items()),
        ]
