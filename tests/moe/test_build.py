# SPDX-License-Identifier: Apache-2.0
"""A plan becomes a layer whose buffers exist before the first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.core.errors import Unsupported
from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.build import build_layer
from tetrarch.numerics.contract import Quantization

ONLINE, NONE = Quantization.NVFP4_ONLINE, Quantization.NONE


def test_layers_of_one_geometry_share_scratch_and_others_get_their_own(
    make_spec: Any, make_quant: Any, make_experts: Any
) -> None:
    scratch, quant = SlotTable(), make_quant(ONLINE)
    one, two, wide = (
        build_layer(make_spec(hidden_size=h), make_experts(quant), quant, scratch=scratch)
        for h in (64, 64, 128)
    )
    for name, buffer in one.scratch.items():
        assert buffer.data_ptr() == two.scratch[name].data_ptr()
    assert one.scratch["hidden_rows"].shape == (128, 64)  # 64 rows, top-2
    assert wide.scratch["hidden_rows"].shape == (128, 128)
    assert wide.scratch["gate_up_rows"].data_ptr() == one.scratch["gate_up_rows"].data_ptr()
    widened = one.scratch["weight"].nbytes + wide.scratch["weight"].nbytes
    assert scratch.num_bytes == 4 * 128 * (64 + 128 + 64) + widened


def test_layers_do_not_share_weights(make_spec: Any, make_quant: Any, make_experts: Any) -> None:
    scratch, quant = SlotTable(), make_quant(ONLINE)
    one, two = (
        build_layer(make_spec(), make_experts(quant), quant, scratch=scratch) for _ in range(2)
    )
    addresses = {*one.weights.addresses().values(), *two.weights.addresses().values()}
    assert len(addresses) == 2 * len(one.weights)


def test_no_forward_allocates_a_slot(
    make_spec: Any,
    make_quant: Any,
    make_experts: Any,
    make_matrices: Any,
    stage: Any,
    make_tokens: Any,
) -> None:
    scratch, quant = SlotTable(), make_quant(ONLINE)
    layer = build_layer(make_spec(), make_experts(quant), quant, scratch=scratch)
    layer.weights.freeze()
    scratch.freeze()
    layer.load(stage(make_spec(), quant, make_matrices(make_spec())), Journal(keeps=False))
    assert layer(*make_tokens(make_spec(), 64)).isfinite().all()


def test_an_ignored_layer_keeps_the_models_dtype(
    make_spec: Any, make_quant: Any, make_layer: Any, make_tokens: Any
) -> None:
    """Its output is that of plain experts bit for bit, and not that of quantized ones."""
    spec = make_spec()
    ignored = make_layer(spec, make_quant(ONLINE), ignored=True)
    assert ignored.weights["gate_up"].dtype == torch.bfloat16
    tokens = make_tokens(spec, 8)
    assert torch.equal(ignored(*tokens), make_layer(spec, make_quant(NONE))(*tokens))
    assert not torch.equal(ignored(*tokens), make_layer(spec, make_quant(ONLINE))(*tokens))


def test_a_share_of_the_experts_is_refused(
    make_spec: Any, make_quant: Any, make_experts: Any
) -> None:
    quant, spec = make_quant(ONLINE), make_spec(num_local_experts=2)
    with pytest.raises(Unsupported, match="over 2 ranks"):
        build_layer(spec, make_experts(quant), quant, scratch=SlotTable())
