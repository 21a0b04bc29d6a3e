# SPDX-License-Identifier: Apache-2.0
"""Experts made of random numbers, for benchmarks: as fast as real ones, and as meaningless."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tetrarch.config.plan import QuantPlan
from tetrarch.moe.types import CanonicalExperts, ExpertSpec, PlainExperts
from tetrarch.numerics.contract import Activations

__all__ = ["random_experts"]

_CODES_RMS = 2.9262  # of E2M1's sixteen values
_SCALES = (0x70, 0x78)  # bytes of 128, 144, ... 240 in E4M3: a block's largest value decides
_SCALES_RMS = 187.6  # of these eight
_LARGEST_INPUT = 8.0  # of a hundred thousand normal numbers, and of what activations make of them


def random_experts(
    spec: ExpertSpec, quant: QuantPlan, *, ignored: bool, generator: Generator
) -> CanonicalExperts | PlainExperts:
    """Draw one layer, in the form in which an `ExpertStager` would return it.

    A matrix of K columns has a deviation of `K ** -0.5`, which keeps numbers the size they are.

    Args:
        spec: The layer's geometry on this rank.
        quant: The contract.
        ignored: The layer runs unquantized.
        generator: On the layer's device.
    """

    def normal(*shape: int, std: float) -> Tensor:
        empty = torch.empty(spec.num_local_experts, *shape, dtype=spec.dtype, device=spec.device)
        return empty.normal_(0.0, std, generator=generator)

    biases = {
        f"{name}_bias": normal(rows, std=0.02)
        for name, (rows, _) in spec.matrices.items()
        if spec.has_bias
    }
    if ignored or not quant.contract.quantizes_weights:
        matrices = {
            name: normal(rows, width, std=width**-0.5)
            for name, (rows, width) in spec.matrices.items()
        }
        return PlainExperts(**matrices, **biases)
    packed: dict[str, Tensor] = {}
    static = quant.contract.activations is Activations.PER_TENSOR
    input_scale = _LARGEST_INPUT / (6 * 448) if static else 1.0
    for name in spec.matrices:
        packed |= _random_matrices(spec, name, generator=generator)
        packed[f"{name}_input_scale"] = torch.tensor(input_scale, device=spec.device)
    return CanonicalExperts(**packed, **biases)


def _random_matrices(spec: ExpertSpec, name: str, *, generator: Generator) -> dict[str, Tensor]:
    """Draw codes and scales, and give all experts one global scale."""
    (rows, width), experts = spec.matrices[name], spec.num_local_experts

    def octets(columns: int, low: int, high: int) -> Tensor:
        empty = torch.empty(experts, rows, columns, dtype=torch.uint8, device=spec.device)
        return empty.random_(low, high, generator=generator)

    columns = (len(spec.parts) - 1,) if name == "gate_up" else ()
    global_scale = width**-0.5 / (_CODES_RMS * _SCALES_RMS)
    return {
        name: octets(width // 2, 0, 256),
        f"{name}_block_scale": octets(width // 16, *_SCALES).view(torch.float8_e4m3fn),
        f"{name}_global_scale": torch.full((experts, *columns), global_scale, device=spec.device),
    }
