# SPDX-License-Identifier: Apache-2.0
"""What flows through an expert layer, in the order in which it flows.

    hidden, Routing -> Dispatched -> expert rows -> hidden

Letters: T tokens of this rank, M rows after dispatch, K experts per token, E experts of this
rank, H hidden, I intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from tetrarch.core.specs import TensorSpec

__all__ = [
    "CanonicalExperts",
    "Dispatched",
    "Dispatcher",
    "ExpertActivation",
    "ExpertSpec",
    "Nvfp4Matrix",
    "Part",
    "PlainExperts",
    "Routing",
    "Runner",
]


class Part(StrEnum):
    """Which matrix of an expert a checkpoint tensor is. A non-gated expert has only up, down."""

    GATE = "gate"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """The nonlinearity between the two GEMMs.

    Gated: `g * sigmoid(alpha * g) * (u + beta)` with `g = min(gate, limit)` and
    `u = clamp(up, -limit, limit)`: SwiGLU at the defaults, gpt-oss's clamped gate at alpha 1.702,
    beta 1, limit 7.
    Not gated: `max(up, 0) ** 2` (relu2).
    """

    gated: bool = True
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The geometry of one rank's share of one layer's experts."""

    num_experts: int
    num_local_experts: int
    first_local_expert: int
    top_k: int
    hidden_size: int  # H; the latent size where the experts work in a latent space
    intermediate_size: int  # I
    activation: ExpertActivation
    has_bias: bool
    dtype: torch.dtype  # of hidden states, biases and unquantized weights
    device: torch.device

    @property
    def num_up_rows(self) -> int:
        """Rows of the first GEMM's weight: 2I gated (gate before up), I otherwise."""
        return self.intermediate_size * (2 if self.activation.gated else 1)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The matrices of one expert."""
        return tuple(Part) if self.activation.gated else (Part.UP, Part.DOWN)

    def shape_of(self, part: Part) -> tuple[int, int]:
        """Output and input size of one matrix: (I, H) for gate and up, (H, I) for down."""
        h, i = self.hidden_size, self.intermediate_size
        return (h, i) if part is Part.DOWN else (i, h)

    def rows_of(self, part: Part) -> slice:
        """The rows that a part takes in the matrix it is stored in, gate before up."""
        begin = self.intermediate_size if part is Part.UP and self.activation.gated else 0
        return slice(begin, begin + self.shape_of(part)[0])

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """What the parts are stored in, by name: output and input size."""
        h, i = self.hidden_size, self.intermediate_size
        return {"gate_up": (self.num_up_rows, h), "down": (h, i)}


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token visits, and with what weight."""

    topk_ids: Tensor  # (T, K) int32, global expert ids
    topk_weights: Tensor  # (T, K) fp32


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rows this rank must compute."""

    hidden: Tensor  # (M, H) bf16, or packed NVFP4 where the route's wire says so
    block_scale: Tensor | None  # (M, H / 16) e4m3 where packed
    routing: Routing  # (M, K); ids outside this rank's share contribute nothing


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """One expert's matrix as a checkpoint serialized it. Scales decode."""

    codes: Tensor  # (N, K / 2) uint8, two E2M1 codes a byte, element 2i in the low nibble
    block_scale: Tensor  # (N, K / 16) e4m3, linear
    global_scale: Tensor  # () fp32
    input_scale: Tensor | None  # () fp32; static activation contracts only


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalExperts:
    """NVFP4 experts as the contract defines them: no swizzle, no interleave, gate before up.

    U is `ExpertSpec.num_up_rows`: 2I for gated experts, I otherwise.
    """

    gate_up: Tensor  # (E, U, H / 2) uint8, two E2M1 codes a byte, low nibble first
    gate_up_block_scale: Tensor  # (E, U, H / 16) e4m3, linear
    gate_up_global_scale: Tensor  # (E, 2) fp32 gate then up; (E, 1) when not gated
    down: Tensor  # (E, H, I / 2) uint8
    down_block_scale: Tensor  # (E, H, I / 16) e4m3, linear
    down_global_scale: Tensor  # (E,) fp32
    gate_up_input_scale: Tensor  # () fp32 decode; 1 where the contract has no static scale
    down_input_scale: Tensor  # () fp32 decode; 1 where the contract has no static scale
    gate_up_bias: Tensor | None = None  # (E, U) model dtype
    down_bias: Tensor | None = None  # (E, H) model dtype

    def some(self, experts: slice) -> CanonicalExperts:
        """Return some of the experts, as views."""
        return CanonicalExperts(**_some(self, experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExperts:
    """Experts that are not quantized, in the model's dtype, gate before up."""

    gate_up: Tensor  # (E, U, H)
    down: Tensor  # (E, H, I)
    gate_up_bias: Tensor | None = None  # (E, U)
    down_bias: Tensor | None = None  # (E, H)

    def some(self, experts: slice) -> PlainExperts:
        """Return some of the experts, as views."""
        return PlainExperts(**_some(self, experts))


def _some(whole: CanonicalExperts | PlainExperts, experts: slice) -> dict[str, Tensor]:
    """Cut every tensor that has one entry for each expert."""
    tensors = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: tensor[experts] if tensor.dim() else tensor for name, tensor in there.items()}


class Dispatcher(Protocol):
    """Brings tokens to their experts and the results home."""

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Send rows to the ranks that own their experts."""
        ...

    def combine(self, rows: Tensor) -> Tensor:
        """Bring the weighted sums home: (M, H) -> (T, H)."""
        ...


class Runner(Protocol):
    """One way to compute the experts of one geometry under one contract.

    Stateless: built from specs and plans, every tensor it touches is handed to it.
    """

    def weight_specs(self) -> Mapping[str, TensorSpec]:
        """Name, shape and dtype of every packed weight of one layer.

        The first axis is the experts', where there is one.
        """
        ...

    def scratch_specs(self) -> Mapping[str, TensorSpec]:
        """Buffers for the largest forward; one set serves all layers."""
        ...

    def pack(self, experts: CanonicalExperts | PlainExperts) -> Mapping[str, Tensor]:
        """Return the runner's own layout, keyed as `weight_specs`. Pure; never in place.

        Layers are packed some experts at a time, so that no expert may depend on others.
        """
        ...

    def unpack(self, weights: Mapping[str, Tensor]) -> CanonicalExperts | PlainExperts:
        """Return what `pack` made the weights from, bit for bit: checksums compare that form.

        What comes back may share memory with `weights`.
        """
        ...

    def run(
        self, x: Dispatched, *, weights: Mapping[str, Tensor], scratch: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the routed, weighted sums: (M, H).

        Raises:
            CapacityExceeded: More rows than the budget that sized `scratch`.
        """
        ...
