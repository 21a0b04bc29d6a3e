# SPDX-License-Identifier: Apache-2.0
"""What is folded can be unfolded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.moe.side import SideTensors
from tetrarch.moe.types import PlainExperts
from tetrarch.numerics.contract import Activations, Quantization
from tetrarch.numerics.scales import alpha

ONLINE, MODELOPT, NONE = Quantization.NVFP4_ONLINE, Quantization.MODELOPT_FP4, Quantization.NONE
CONTRACTS = [
    (ONLINE, Activations.PER_TOKEN),
    (MODELOPT, Activations.PER_TENSOR),
    (NONE, Activations.BF16),
]


@pytest.mark.parametrize(("quantization", "activations"), CONTRACTS)
def test_tensors_fit_their_specs_and_unfold_bit_for_bit(
    make_spec: Any,
    make_quant: Any,
    make_matrices: Any,
    serialize: Any,
    stage: Any,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """A static input scale of 0.3 is no power of two: what folds it rounds."""
    spec, quant = make_spec(has_bias=True), make_quant(quantization, activations)
    matrices = make_matrices(spec)
    biases = {key: matrix[:, 0] for key, matrix in matrices.items()}
    if quantization is MODELOPT:
        matrices = {key: serialize(m, input_scale=0.3) for key, m in matrices.items()}
    experts = stage(spec, quant, matrices, biases=biases)
    packed = not isinstance(experts, PlainExperts)
    side = SideTensors.of(spec, activations, packed=packed)
    tensors = side.pack(experts)
    assert tensors.keys() == side.specs().keys()
    assert all(need.mismatch(tensors[name]) is None for name, need in side.specs().items())
    back = {**side.biases(tensors), **(side.scales(tensors) if packed else {})}
    for name, tensor in back.items():
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor, getattr(experts, name)), name
    if quantization is MODELOPT:
        encode = torch.tensor(0.3).reciprocal()
        assert torch.equal(tensors["down_encode_scale"], encode)
        folded = alpha(experts.down_global_scale, encode)
        assert torch.equal(tensors["down_scale"].squeeze(1), folded)


def test_the_other_form_of_experts_is_refused(make_spec: Any) -> None:
    side = SideTensors.of(make_spec(), Activations.BF16, packed=True)
    with pytest.raises(TypeError, match="PlainExperts"):
        side.pack(PlainExperts(gate_up=torch.zeros(1), down=torch.zeros(1)))
