# SPDX-License-Identifier: Apache-2.0
"""Triton's activations against the torch ones, and their rounding against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tetrarch.kernels.activation.reference import relu2, swiglu
from tetrarch.moe.types import ExpertActivation
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Recipe
from tolerance import GPU_EXP, assert_close

kernels: Any = pytest.importorskip(
    "tetrarch.kernels.activation.triton", reason="pip install tetrarch[test-kernels]"
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NaN in numpy
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ACTIVATIONS = [
    ExpertActivation(),
    ExpertActivation(alpha=1.702, beta=1.0, limit=7.0),
    ExpertActivation(limit=2.0),
    ExpertActivation(gated=False),
]


def shapes(device: torch.device) -> list[tuple[int, int]]:
    small = [(1, 16), (5, 80), (3, 272)]
    return small if device.type == "cpu" else [*small, (33, 768), (1500, 1024), (9, 2688)]


def inputs(activation: ExpertActivation, rows: int, width: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows + width)
    columns = width * (2 if activation.gated else 1)
    return (torch.randn(rows, columns, generator=generator) * 4).to(device)


def activated(
    gate_up: Tensor, activation: ExpertActivation, *, dtype: torch.dtype = FP32
) -> Tensor:
    width = gate_up.shape[1] // (2 if activation.gated else 1)
    out = gate_up.new_empty(gate_up.shape[0], width, dtype=dtype)
    kernels.activate(gate_up, activation, out=out)
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_is_the_reference_up_to_an_exponential(
    device: torch.device, activation: ExpertActivation
) -> None:
    for shape in shapes(device):
        gate_up = inputs(activation, *shape, device)
        want = relu2(gate_up)
        if activation.gated:
            a = activation
            want = swiglu(gate_up, alpha=a.alpha, beta=a.beta, limit=a.limit)
        result = activated(gate_up, activation)
        assert_close(result, want, GPU_EXP)
        for dtype in (BF16, FP16):  # rounded once
            assert torch.equal(activated(gate_up, activation, dtype=dtype), result.to(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_what_is_not_a_number_stays_so(device: torch.device, activation: ExpertActivation) -> None:
    gate_up = inputs(activation, 2, 16, device)
    gate_up[1, 3] = float("nan")
    result = activated(gate_up, activation)
    assert result.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("recipe", [None, Recipe(448, "mae"), Recipe(256, "mse", half_error=True)])
@pytest.mark.parametrize("activation", [ACTIVATIONS[0], ACTIVATIONS[3]], ids=str)
def test_under_a_token_scale_the_rounded_activation_is_rounded_again(
    device: torch.device, activation: ExpertActivation, recipe: Recipe | None, dtype: torch.dtype
) -> None:
    """The same bits as two kernels with the activation stored between them."""
    how: dict[str, Any] = dict(recipe=recipe)
    if recipe is not None:
        how["factor"] = recipe.token_factor
    for shape in shapes(device):
        gate_up = inputs(activation, *shape, device)
        values = torch.empty(shape, dtype=dtype, device=device)
        token_scale = torch.empty(shape[0], device=device)
        kernels.activate_round(gate_up, activation, values=values, token_scale=token_scale, **how)
        stored = activated(gate_up, activation, dtype=dtype)
        products, scales = nvfp4.fake_quant_per_token(stored, dtype=dtype, **how)
        assert torch.equal(values, products)
        assert torch.equal(token_scale, scales)


def test_under_a_static_scale_the_activation_is_rounded_once(device: torch.device) -> None:
    """A case where rounding to BF16 between would show."""
    encode_scale, differ = torch.tensor(40.0, device=device), 0
    for activation in ACTIVATIONS:
        for shape in shapes(device):
            gate_up = inputs(activation, *shape, device)
            values = torch.empty(shape, dtype=BF16, device=device)
            kernels.activate_round(gate_up, activation, values=values, encode_scale=encode_scale)
            exact = activated(gate_up, activation)
            want = nvfp4.fake_quant(exact, encode_scale=encode_scale, dtype=BF16)
            assert torch.equal(values, want)
            twice = nvfp4.fake_quant(exact.bfloat16(), encode_scale=encode_scale, dtype=BF16)
            differ += int((values != twice).sum())
    assert differ > 0


def test_rows_that_are_not_owned_are_left_alone(device: torch.device) -> None:
    gate_up = inputs(ACTIVATIONS[0], 5, 32, device)
    gate_up[1] = float("nan")
    owned = torch.tensor([True, False, True, True, False], device=device)
    values = torch.full((5, 32), 7.0, dtype=BF16, device=device)
    token_scale = torch.full((5,), 7.0, device=device)
    kernels.activate_round(
        gate_up, ACTIVATIONS[0], values=values, token_scale=token_scale, owned=owned
    )
    stored = activated(gate_up, ACTIVATIONS[0], dtype=BF16)
    products, scales = nvfp4.fake_quant_per_token(stored, dtype=BF16)
    assert torch.equal(values[owned], products[owned])
    assert torch.equal(token_scale[owned], scales[owned])
    assert (values[~owned] == 7.0).all()
    assert (token_scale[~owned] == 7.0).all()


def test_no_rows_are_no_launch(device: torch.device) -> None:
    assert activated(torch.empty(0, 64, device=device), ACTIVATIONS[0]).shape == (0, 32)
