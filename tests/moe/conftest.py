# SPDX-License-Identifier: Apache-2.0
"""Small expert layers under any contract."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tetrarch.config.hardware import Arch
from tetrarch.config.plan import ExpertPlan, QuantPlan, TokenBudget
from tetrarch.config.support import SUPPORT, Finalize, Route
from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.build import build_layer
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import (
    CanonicalExperts,
    ExpertActivation,
    ExpertSpec,
    Nvfp4Matrix,
    Part,
    PlainExperts,
)
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import (
    WEIGHT_RECIPE,
    Activations,
    Quantization,
    SourceFormat,
    contract_for,
)

Matrices = dict[tuple[Part, int], Tensor]


def _spec(**overrides: object) -> ExpertSpec:
    spec = ExpertSpec(
        num_experts=4,
        num_local_experts=4,
        first_local_expert=0,
        top_k=2,
        hidden_size=64,
        intermediate_size=32,
        activation=ExpertActivation(),
        has_bias=False,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return replace(spec, **overrides)


def _quant(
    quantization: Quantization, activations: Activations | None = None, **overrides: object
) -> QuantPlan:
    contract = contract_for(quantization, activations)
    assert contract is not None
    plan = QuantPlan(
        contract=contract,
        source=SourceFormat.BF16,
        ignored_layers=(),
        weight_recipe=WEIGHT_RECIPE,
        activation_recipe=None,
        fc2_input_scale=1 / 2688,
    )
    return replace(plan, **overrides)


def _cpu_route(activations: Activations) -> Route:
    fits = (row for row in SUPPORT if row.activations is activations)
    return next(row for row in fits if Arch.CPU in row.archs)


def _experts(quant: QuantPlan, *, rows: int = 64, decoded_cache: bool = True) -> ExpertPlan:
    return ExpertPlan(
        route=_cpu_route(quant.contract.activations),
        finalize=Finalize.SEPARATE,
        budget=TokenBudget(per_rank=rows, rows=rows, term="the test's own limit"),
        decoded_cache=decoded_cache,
    )


def _matrices(spec: ExpertSpec, seed: int = 0) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    return {
        (part, expert): torch.randn(spec.shape_of(part), generator=generator).mul(0.2).bfloat16()
        for expert in range(spec.num_experts)
        for part in spec.parts
    }


def _serialized(matrix: Tensor, *, input_scale: float | None = None) -> Nvfp4Matrix:
    codes, block_scale, global_scale = nvfp4.encode_weight(matrix, recipe=None)
    scale = None if input_scale is None else torch.tensor(input_scale)
    return Nvfp4Matrix(codes, block_scale, global_scale, scale)


def _stage(
    spec: ExpertSpec,
    quant: QuantPlan,
    matrices: dict[tuple[Part, int], Tensor | Nvfp4Matrix],
    *,
    ignored: bool = False,
    biases: Matrices | None = None,
) -> CanonicalExperts | PlainExperts:
    stager = ExpertStager(spec, quant, ignored=ignored)
    for (part, expert), value in matrices.items():
        stager.put(part, expert, value)
    for (part, expert), value in (biases or {}).items():
        stager.put_bias(part, expert, value)
    return stager.finish()


def _layer(
    spec: ExpertSpec,
    quant: QuantPlan,
    weights: CanonicalExperts | PlainExperts | None = None,
    *,
    ignored: bool = False,
    rows: int = 64,
    decoded_cache: bool = True,
) -> MoELayer:
    plan = _experts(quant, rows=rows, decoded_cache=decoded_cache)
    layer = build_layer(spec, plan, quant, scratch=SlotTable(), ignored=ignored)
    if weights is None:
        weights = _stage(spec, quant, _matrices(spec), ignored=ignored)
    layer.load(weights, Journal(keeps=False))
    return layer


def _tokens(spec: ExpertSpec, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, spec.hidden_size, generator=generator).to(spec.dtype)
    scores = torch.rand(count, spec.num_experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(spec.top_k)
    return hidden, ids, weights


def _exported(folder: Path, kind: str) -> dict[tuple[Part, int], Nvfp4Matrix]:
    tensors = load_file(folder / "model.safetensors")
    found: dict[tuple[Part, int], Nvfp4Matrix] = {}
    for part, expert in itertools.product(Part, range(2)):
        stem = f"model.layers.0.mlp.experts.{expert}.{part}_proj."
        leaf = {name.removeprefix(stem): t for name, t in tensors.items() if name.startswith(stem)}
        if kind == "modelopt":
            scales = leaf["weight_scale_2"], leaf["input_scale"]
        else:
            encode = leaf["weight_global_scale"], leaf["input_global_scale"]
            scales = encode[0].reciprocal(), encode[1].reciprocal()
        codes = leaf["weight" if kind == "modelopt" else "weight_packed"]
        found[part, expert] = Nvfp4Matrix(codes, leaf["weight_scale"], *scales)
    return found


# Factories as fixtures: test modules cannot import each other under importlib mode.


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., ExpertSpec]:
    """Overrides → a geometry: 4 experts of 64 x 32, top-2, gated, bf16."""
    return _spec


@pytest.fixture(scope="session")
def make_quant() -> Callable[..., QuantPlan]:
    """Quantization, activations, overrides → a contract with its recipes."""
    return _quant


@pytest.fixture(scope="session")
def make_experts() -> Callable[..., ExpertPlan]:
    """A contract → the reference runner with room for 64 rows."""
    return _experts


@pytest.fixture(scope="session")
def make_matrices() -> Callable[..., Matrices]:
    """A geometry and a seed → random bf16 matrices by (part, expert)."""
    return _matrices


@pytest.fixture(scope="session")
def serialize() -> Callable[..., Nvfp4Matrix]:
    """A matrix → the same as a checkpoint stores it, with a global scale of its own."""
    return _serialized


@pytest.fixture(scope="session")
def exported(golden: Path) -> Callable[..., dict[tuple[Part, int], Nvfp4Matrix]]:
    """`modelopt` or `ct` → the matrices of that tool's tiny export, 2 experts of 64 x 64."""
    return lambda kind: _exported(golden / f"{kind}_nvfp4_tiny_moe", kind)


@pytest.fixture(scope="session")
def stage() -> Callable[..., CanonicalExperts | PlainExperts]:
    """Geometry, contract, matrices → a layer's experts, through the stager."""
    return _stage


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., MoELayer]:
    """Geometry, contract, experts (random if none are given) → a loaded layer."""
    return _layer


@pytest.fixture(scope="session")
def make_tokens() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A geometry, a count and a seed → hidden states, expert ids, routing weights."""
    return _tokens
