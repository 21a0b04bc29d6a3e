# SPDX-License-Identifier: Apache-2.0
"""What a runner keeps beside a layer's matrices: scales folded for the epilogue, biases in FP32.

Folding rounds, so what was folded is kept as well: `unpack` must return it bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from tetrarch.core.specs import TensorSpec
from tetrarch.moe.types import CanonicalExperts, ExpertSpec, PlainExperts
from tetrarch.numerics.contract import Activations
from tetrarch.numerics.scales import alpha

__all__ = ["Biases", "Scales", "SideTensors"]

_FP32 = torch.float32


class Biases(TypedDict, total=False):
    """Fields of both forms of experts."""

    gate_up_bias: Tensor
    down_bias: Tensor


class Scales(TypedDict):
    """Fields of `CanonicalExperts`."""

    gate_up_global_scale: Tensor
    gate_up_input_scale: Tensor
    down_global_scale: Tensor
    down_input_scale: Tensor


@dataclass(frozen=True, slots=True)
class SideTensors:
    """Names: `gate_up_` or `down_`, then `scale`, `encode_scale`, `bias` or what unfolds them."""

    spec: ExpertSpec
    packed: bool  # the experts are NVFP4
    static: bool  # the contract has one input scale per GEMM

    @classmethod
    def of(cls, spec: ExpertSpec, activations: Activations, *, packed: bool) -> SideTensors:
        """Return those of a layer under a contract."""
        return cls(spec, packed, packed and activations is Activations.PER_TENSOR)

    def specs(self) -> dict[str, TensorSpec]:
        """Return their specs by name."""
        s, e = self.spec, self.spec.num_local_experts
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (out, _) in s.matrices.items():
            columns = len(s.parts) - 1 if name == "gate_up" else 1
            if self.packed:
                shapes[f"{name}_scale"] = (e, columns)
            if self.static:
                shapes[f"{name}_encode_scale"] = ()
                shapes[f"{name}_input_scale"] = ()  # these two are for `unpack`
                shapes[f"{name}_global_scale"] = (e, columns)
            if s.has_bias:
                shapes[f"{name}_bias"] = (e, out)
        return {name: TensorSpec(shape, _FP32, s.device) for name, shape in shapes.items()}

    def pack(self, experts: CanonicalExperts | PlainExperts) -> dict[str, Tensor]:
        """Return them: with static scales, the encode scale divides the weight's scale.

        Raises:
            TypeError: These experts are of the other form.
        """
        if isinstance(experts, CanonicalExperts) is not self.packed:
            raise TypeError(f"this layer cannot take {type(experts).__name__}")
        tensors = self._pack_scales(experts) if isinstance(experts, CanonicalExperts) else {}
        if experts.gate_up_bias is not None and experts.down_bias is not None:
            tensors["gate_up_bias"] = experts.gate_up_bias.float()
            tensors["down_bias"] = experts.down_bias.float()
        return tensors

    def _pack_scales(self, experts: CanonicalExperts) -> dict[str, Tensor]:
        gate_up, down = experts.gate_up_global_scale, experts.down_global_scale.unsqueeze(1)
        if not self.static:
            return {"gate_up_scale": gate_up, "down_scale": down}
        inputs = experts.gate_up_input_scale, experts.down_input_scale
        encode = inputs[0].reciprocal(), inputs[1].reciprocal()
        return {
            "gate_up_scale": alpha(gate_up, encode[0]),
            "gate_up_encode_scale": encode[0],
            "gate_up_input_scale": inputs[0],
            "gate_up_global_scale": gate_up,
            "down_scale": alpha(down, encode[1]),
            "down_encode_scale": encode[1],
            "down_input_scale": inputs[1],
            "down_global_scale": down,
        }

    def biases(self, weights: Mapping[str, Tensor]) -> Biases:
        """Return the biases in the model's dtype, or nothing."""
        if not self.spec.has_bias:
            return {}
        return {
            "gate_up_bias": weights["gate_up_bias"].to(self.spec.dtype),
            "down_bias": weights["down_bias"].to(self.spec.dtype),
        }

    def scales(self, weights: Mapping[str, Tensor]) -> Scales:
        """Return the scales as `pack` was given them."""
        kind, one = ("global_scale" if self.static else "scale"), torch.ones(())
        one = one.to(weights["gate_up_scale"].device)
        return {
            "gate_up_global_scale": weights[f"gate_up_{kind}"],
            "gate_up_input_scale": weights["gate_up_input_scale"] if self.static else one,
            "down_global_scale": weights[f"down_{kind}"].squeeze(1),
            "down_input_scale": weights["down_input_scale"] if self.static else one,
        }
