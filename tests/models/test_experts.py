# SPDX-License-Identifier: Apache-2.0
"""The activation of an expert module is found by trying, and refused when nothing fits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tetrarch.core.errors import CheckpointError
from tetrarch.models.experts import expert_shape, is_expert_module, match_activation
from tetrarch.moe.types import ExpertActivation


class Experts(nn.Module):
    """What transformers' decorator leaves behind."""

    def __init__(self, *, gated: bool = True, transposed: bool = False, **constants: float) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = gated, False, transposed
        self.is_concatenated, self.has_post_expert_norm = True, False
        shape = (3, 32, 64) if transposed else (3, 64, 32)
        self.down_proj = nn.Parameter(torch.empty(shape, device="meta"))
        self.act_fn: nn.Module = nn.SiLU()
        for name, value in constants.items():
            setattr(self, name, value)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Clamped(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        limit = vars(self)["swiglu_limit"]
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class GateOnlyClamped(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=vars(self)["swiglu_limit"])) * up


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def test_constants_are_taken_from_the_module_whatever_their_name() -> None:
    assert match_activation(Experts()) == ExpertActivation()
    assert match_activation(Clamped(swiglu_limit=5.0)) == ExpertActivation(limit=5.0)
    assert match_activation(Clamped(swiglu_limit=5, width=64)) == ExpertActivation(limit=5.0)


def test_experts_without_a_gate_square_a_relu() -> None:
    module = Experts(gated=False)
    module.act_fn = Squared()
    assert match_activation(module) == ExpertActivation(gated=False, limit=math.inf)
    module.act_fn = nn.ReLU()
    with pytest.raises(CheckpointError, match="Experts"):
        match_activation(module)


@pytest.mark.parametrize("module", [GateOnlyClamped(swiglu_limit=5.0), Clamped(swiglu_limit=-5.0)])
def test_an_unknown_formula_is_refused(module: nn.Module) -> None:
    with pytest.raises(CheckpointError, match="none of SwiGLU"):
        match_activation(module)


def test_a_gelu_gate_is_refused() -> None:
    module = Experts()
    module.act_fn = nn.GELU()
    with pytest.raises(CheckpointError, match="none of SwiGLU"):
        match_activation(module)


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_do_not_depend_on_the_layout(transposed: bool) -> None:
    shape = expert_shape(Experts(transposed=transposed))
    assert (shape.num_experts, shape.hidden_size, shape.intermediate_size) == (3, 64, 32)


def test_only_decorated_modules_are_experts() -> None:
    assert is_expert_module(Experts())
    assert not is_expert_module(nn.ModuleList([nn.Linear(2, 2)]))
    normed = Experts()
    normed.has_post_expert_norm = True
    with pytest.raises(CheckpointError, match="normalises"):
        expert_shape(normed)
