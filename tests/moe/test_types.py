# SPDX-License-Identifier: Apache-2.0
"""A geometry says where each matrix of an expert goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.moe.types import ExpertActivation, Part
from tetrarch.numerics.contract import Quantization


def test_gate_lies_before_up(make_spec: Any) -> None:
    spec = make_spec(hidden_size=64, intermediate_size=32)
    assert spec.parts == (Part.GATE, Part.UP, Part.DOWN)
    assert [spec.shape_of(part) for part in Part] == [(32, 64), (32, 64), (64, 32)]
    assert [spec.rows_of(part) for part in Part] == [slice(0, 32), slice(32, 64), slice(0, 64)]
    assert spec.matrices == {"gate_up": (64, 64), "down": (64, 32)}


def test_without_a_gate_up_stands_alone(make_spec: Any) -> None:
    spec = make_spec(activation=ExpertActivation(gated=False))
    assert spec.parts == (Part.UP, Part.DOWN)
    assert spec.rows_of(Part.UP) == slice(0, 32)
    assert spec.matrices == {"gate_up": (32, 64), "down": (64, 32)}


@pytest.mark.parametrize("gated", [True, False])
def test_the_parts_tile_their_matrices(make_spec: Any, gated: bool) -> None:
    """Every row of every matrix belongs to exactly one part."""
    spec = make_spec(activation=ExpertActivation(gated=gated))
    for matrix, (rows, width) in spec.matrices.items():
        owners = torch.zeros(rows)
        for part in spec.parts:
            if (matrix == "down") == (part is Part.DOWN):
                owners[spec.rows_of(part)] += 1
                assert spec.shape_of(part)[1] == width
        assert owners.tolist() == [1.0] * rows


def test_some_experts_are_views_of_all_of_them(
    make_spec: Any, make_quant: Any, make_matrices: Any, stage: Any
) -> None:
    """What is one for all, an input scale, stays whole."""
    for quantization in (Quantization.NVFP4_ONLINE, Quantization.NONE):
        whole = stage(make_spec(), make_quant(quantization), make_matrices(make_spec()))
        part = whole.some(slice(1, 3))
        assert part.gate_up.data_ptr() == whole.gate_up[1].data_ptr()
        assert torch.equal(part.down, whole.down[1:3])
        assert part.gate_up_bias is None
        if quantization is not Quantization.NONE:
            assert part.down_input_scale.shape == ()
