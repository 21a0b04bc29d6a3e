# SPDX-License-Identifier: Apache-2.0
"""Random experts are what a stager could have returned: shapes, types, sizes of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.moe.dummy import random_experts
from tetrarch.moe.types import CanonicalExperts, ExpertActivation, PlainExperts
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Activations, Quantization


def draw(spec: Any, quant: Any, *, ignored: bool = False) -> Any:
    generator = torch.Generator().manual_seed(0)
    return random_experts(spec, quant, ignored=ignored, generator=generator)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ignored", [True, False])
def test_they_have_the_shapes_and_types_of_loaded_ones(
    make_spec: Any, make_quant: Any, make_matrices: Any, stage: Any, gated: bool, ignored: bool
) -> None:
    spec = make_spec(activation=ExpertActivation(gated=gated))
    quant = make_quant(Quantization.NVFP4_ONLINE)
    loaded = stage(spec, quant, make_matrices(spec), ignored=ignored)
    drawn = draw(spec, quant, ignored=ignored)
    assert type(drawn) is type(loaded) is (PlainExperts if ignored else CanonicalExperts)
    kinds = [
        {name: (t.shape, t.dtype) for name, t in vars_of(one).items() if t is not None}
        for one in (drawn, loaded)
    ]
    assert kinds[0] == kinds[1]


def vars_of(experts: Any) -> dict[str, Any]:
    return {name: getattr(experts, name) for name in experts.__dataclass_fields__}


def test_a_matrix_of_k_columns_has_a_deviation_of_one_over_the_root_of_k(
    make_spec: Any, make_quant: Any
) -> None:
    spec = make_spec(hidden_size=256, intermediate_size=512, has_bias=True)
    drawn = draw(spec, make_quant(Quantization.NVFP4_ONLINE))
    for codes, scales, factor, width in (
        (drawn.gate_up, drawn.gate_up_block_scale, drawn.gate_up_global_scale[0, 0], 256),
        (drawn.down, drawn.down_block_scale, drawn.down_global_scale[0], 512),
    ):
        values = nvfp4.decode(codes, scales, global_scale=factor)
        assert values.std() * width**0.5 == pytest.approx(1, rel=0.01)
    assert drawn.gate_up_bias.float().std() == pytest.approx(0.02, rel=0.1)


def test_only_a_static_contract_has_input_scales(make_spec: Any, make_quant: Any) -> None:
    per_token = draw(make_spec(), make_quant(Quantization.NVFP4_ONLINE))
    quant = make_quant(Quantization.MODELOPT_FP4, Activations.PER_TENSOR)
    static = draw(make_spec(), quant)
    assert per_token.gate_up_input_scale == per_token.down_input_scale == 1
    assert static.gate_up_input_scale == static.down_input_scale == pytest.approx(8 / 2688)
