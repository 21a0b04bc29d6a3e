# SPDX-License-Identifier: Apache-2.0
"""Expert activations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tetrarch.kernels.activation.reference import relu2, swiglu


@pytest.mark.parametrize(
    ("alpha", "beta", "limit"), [(1.0, 0.0, math.inf), (1.702, 1.0, 7.0), (1.0, 0.0, 2.0)]
)
def test_swiglu_is_its_formula(alpha: float, beta: float, limit: float) -> None:
    """Values reach beyond every limit; gate and up swapped must not pass."""
    torch.manual_seed(0)
    gate_up = torch.randn(9, 32) * 6
    gate, up = gate_up.double().chunk(2, dim=1)

    def formula(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g / (1 + torch.exp(-alpha * g)) * (u + beta)

    result = swiglu(gate_up, alpha=alpha, beta=beta, limit=limit).double()
    torch.testing.assert_close(result, formula(gate, up), rtol=1e-6, atol=1e-6)
    assert (result - formula(up, gate)).abs().max() > 1


def test_the_gate_is_not_clamped_from_below() -> None:
    far = torch.tensor([[-9.0, -9.0]])
    clamped = swiglu(far, alpha=0.0, limit=2.0)
    assert clamped.item() == -9.0 * 0.5 * -2.0


def test_relu2_is_zero_below_zero_and_a_square_above() -> None:
    assert relu2(torch.tensor([-3.0, 0.0, 1.5])).tolist() == [0.0, 0.0, 2.25]
