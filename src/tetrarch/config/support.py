# SPDX-License-Identifier: Apache-2.0
"""What runs with what: one table, read by the launcher, the command line, the docs and the tests.

A row that is absent is unsupported. A combination that people will try is refused by name in
`REFUSED`, so that the answer says why. Rows are keyed on the *activations*; the quantization
names that may carry them are a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tetrarch.config.hardware import Arch
from tetrarch.numerics.contract import Activations, Quantization

__all__ = ["SUPPORT", "Finalize", "Route", "Wire"]


class Wire(StrEnum):
    """What the dispatcher sends between ranks."""

    BF16 = "bf16"
    NVFP4 = "nvfp4"


class Finalize(StrEnum):
    """How the top-k partial results become one row."""

    FUSED = "fused"  # atomic adds in the second GEMM: fastest, order not fixed
    SEPARATE = "separate"  # fixed slot order, one rounding: deterministic


@dataclass(frozen=True, slots=True)
class Route:
    """One supported way from router logits to expert output."""

    activations: Activations
    quantizations: tuple[Quantization, ...]
    runner: str
    dispatch: str
    archs: frozenset[Arch]
    wire: Wire = Wire.BF16
    finalize: tuple[Finalize, ...] = (Finalize.SEPARATE,)  # first is the default


_ANY = frozenset(Arch)
_Q, _A = Quantization, Activations
_NVFP4 = (_Q.NVFP4_ONLINE, _Q.MODELOPT_FP4)
_ALL = (*_NVFP4, _Q.NONE)

# Order is preference: `auto` takes the first row that fits.
SUPPORT: tuple[Route, ...] = (
    Route(_A.PER_TOKEN, _NVFP4, "reference", "all_gather", _ANY),
    Route(_A.PER_TENSOR, (_Q.MODELOPT_FP4,), "reference", "all_gather", _ANY),
    Route(_A.BF16, _ALL, "reference", "all_gather", _ANY),
)
