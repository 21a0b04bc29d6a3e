# SPDX-License-Identifier: Apache-2.0
"""The layer has the signature of Hugging Face's `experts` and keeps nothing of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.core.errors import AddressChanged
from tetrarch.memory.journal import Journal
from tetrarch.numerics.contract import Quantization

ONLINE = Quantization.NVFP4_ONLINE


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_a_routers_dtypes_do_not_matter(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    ids_dtype: torch.dtype,
    weights_dtype: torch.dtype,
) -> None:
    layer = make_layer(make_spec(), make_quant(ONLINE))
    hidden, ids, _ = make_tokens(make_spec(), 5)
    weights = torch.tensor([[0.75, 0.25]]).expand(5, 2)  # BF16 holds them
    output = layer(hidden, ids.to(ids_dtype), weights.to(weights_dtype))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, layer(hidden, ids, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_next_forward_does_not_touch_the_last_ones_output(
    make_spec: Any, make_quant: Any, make_layer: Any, make_tokens: Any, dtype: torch.dtype
) -> None:
    """Scratch is shared by all layers; what a forward returns is not in it."""
    spec = make_spec(dtype=dtype)
    layer = make_layer(spec, make_quant(ONLINE))
    output = layer(*make_tokens(spec, 6, seed=1))
    kept = output.clone()
    layer(*make_tokens(spec, 6, seed=2))
    assert torch.equal(output, kept)


def test_a_hidden_state_with_a_gradient_is_served(
    make_spec: Any, make_quant: Any, make_layer: Any, make_tokens: Any
) -> None:
    """Parameters of a fresh Hugging Face model require gradients; serving never wants them."""
    layer = make_layer(make_spec(), make_quant(ONLINE))
    hidden, ids, weights = make_tokens(make_spec(), 3)
    output = layer(hidden.clone().requires_grad_(), ids, weights)
    assert not output.requires_grad
    assert torch.equal(output, layer(hidden, ids, weights))


def test_experts_of_another_size_are_refused(
    make_spec: Any, make_quant: Any, make_layer: Any, make_matrices: Any, stage: Any
) -> None:
    layer = make_layer(make_spec(), make_quant(ONLINE))
    other = make_spec(intermediate_size=48)
    with pytest.raises(AddressChanged, match="gate_up"):
        layer.load(stage(other, make_quant(ONLINE), make_matrices(other)), Journal(keeps=False))


def test_a_layer_packed_in_pieces_holds_what_it_would_as_a_whole(
    make_spec: Any, make_quant: Any, make_layer: Any, make_matrices: Any, stage: Any
) -> None:
    """Eighteen experts go two at a time; the slots hold what packing them together gives."""
    spec = make_spec(num_experts=18, num_local_experts=18)
    for quantization in (ONLINE, Quantization.MODELOPT_FP4, Quantization.NONE):
        quant = make_quant(quantization)
        experts = stage(spec, quant, make_matrices(spec))
        layer = make_layer(spec, quant, experts)
        for name, packed in layer.runner.pack(experts).items():
            octets = [
                tensor.contiguous().view(-1).view(torch.uint8)
                for tensor in (packed, layer.weights[name])
            ]
            assert torch.equal(*octets), name
