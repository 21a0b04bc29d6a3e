# SPDX-License-Identifier: Apache-2.0
"""Siblings make one product, and nobody can tell but by the time it takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tetrarch.config.plan import Plan
from tetrarch.memory.arena import HostArena
from tetrarch.models.build import Model, build_model
from tetrarch.models.sources import SafetensorsSource
from tetrarch.models.surgery import Joint, Share, join_products, joints_of, neighbours, part_unlike
from tolerance import SUM_ORDER, assert_close

# family → joint products of a layer with experts, and of a layer without any
FAMILIES = {
    "qwen3_moe": ["q_proj k_proj v_proj"],
    "qwen2_moe": ["q_proj k_proj v_proj", "gate_proj up_proj"],
    "mixtral": ["q_proj k_proj v_proj"],
    "olmoe": ["q_proj k_proj v_proj"],
    "deepseek_v2": ["q_a_proj kv_a_proj_with_mqa", "gate_proj up_proj"],
    "deepseek_v3": ["q_a_proj kv_a_proj_with_mqa", "gate_proj up_proj"],
    "glm4_moe": ["q_proj k_proj v_proj", "gate_proj up_proj"],
    "glm4_moe_lite": ["q_a_proj kv_a_proj_with_mqa", "gate_proj up_proj"],
    "gpt_oss": ["q_proj k_proj v_proj"],
    "minimax_m2": ["q_proj k_proj v_proj"],
}


class Layer(nn.Module):
    def __init__(self, *, bias: bool = False, wide: int = 24) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 32, bias=bias)
        self.k_proj = nn.Linear(wide, 16, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


class Counted:
    """`F.linear`, and how often it was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.count += 1
        return F.linear(rows, weight, bias)


def joined(layer: nn.Module, product: Any = F.linear) -> nn.Module:
    """Do to a layer with data what a build does to one on `meta`."""
    join_products(layer, product)
    for joint in joints_of(layer):
        for kind in ("weight", "bias"):
            parts = [getattr(share, kind) for share in joint.shares]
            if parts[0] is not None:
                whole = torch.cat([part.detach() for part in parts])
                for share, part in zip(joint.shares, whole.split([*map(len, parts)]), strict=True):
                    setattr(share, kind, nn.Parameter(part, requires_grad=False))
        joint.bind()
    return layer


def paths(model: Model) -> list[str]:
    """Return the names of each joint's layers."""
    names = {module: path.rpartition(".")[2] for path, module in model.hf.named_modules()}
    return [" ".join(names[share] for share in joint.shares) for joint in joints_of(model.hf)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_multiplies_together_and_computes_the_same(
    lab: Any, family: str, dtype: str
) -> None:
    model, _ = lab.load(lab.tiny(family), dtype=dtype)
    assert set(paths(model)) == set(FAMILIES[family])
    together = lab.logits(model)
    assert part_unlike(model.hf) == 0
    for joint in joints_of(model.hf):
        joint.is_apart = True
    if dtype == "bfloat16":
        assert torch.equal(lab.logits(model), together)
    assert_close(lab.logits(model), together, SUM_ORDER)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_calls_its_layers_as_foreseen(
    lab: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = lab.load(lab.tiny(family))
    counts: dict[Joint, int] = {}

    def multiply(joint: Joint, rows: Tensor) -> Any:
        counts[joint] = counts.get(joint, 0) + 1
        return original(joint, rows)

    def alone(*_: object) -> None:
        raise AssertionError("a layer was called out of turn")

    original = Joint.multiply
    monkeypatch.setattr(Joint, "multiply", multiply)
    for joint in joints_of(model.hf):
        for share in joint.shares:
            share._product = alone  # pyright: ignore
    lab.logits(model)
    assert counts == dict.fromkeys(joints_of(model.hf), 1)


@pytest.mark.parametrize("bias", [False, True])
def test_three_products_become_one(bias: bool) -> None:
    plain, counted = Layer(bias=bias), Counted()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    rows = torch.randn(2, 5, 24)
    expected = plain(rows)
    layer = joined(plain, counted)
    assert torch.equal(layer(rows), expected)
    assert counted.count == 1
    assert layer.state_dict().keys() == state.keys()
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in state.items())


def test_layers_that_do_not_fit_into_one_matrix_stay_apart() -> None:
    layer = Layer(wide=25)
    assert joints_of(joined(layer)) == []
    layer = Layer()
    layer.v_proj = nn.Linear(24, 8)  # with a bias
    assert joints_of(joined(layer)) == []
    layer = Layer()
    layer.k_proj.bfloat16()
    assert joints_of(joined(layer)) == []


def test_rows_that_come_out_of_turn_get_their_own_product() -> None:
    layer = joined(Layer())
    one, other = torch.randn(2, 3, 24)
    q, k, v = layer.get_submodule("q_proj"), layer.k_proj, layer.v_proj
    expected = {name: F.linear(other, p) for name, p in layer.named_parameters()}
    q(one)  # and then, as after an error, something else
    assert torch.equal(v(other), expected["v_proj.weight"])
    assert torch.equal(k(other), expected["k_proj.weight"])
    assert torch.equal(q(other), expected["q_proj.weight"])
    assert torch.equal(k(other), expected["k_proj.weight"])
    assert torch.equal(v(other), expected["v_proj.weight"])
    assert torch.equal(v(other), expected["v_proj.weight"]), "taken once, and made anew"


def test_a_joint_keeps_no_rows_once_all_have_theirs() -> None:
    layer = joined(Layer())
    layer(torch.randn(3, 24))
    joint = joints_of(layer)[0]
    assert (joint._rows, joint._waiting) == (None, ())  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_joint_that_computes_something_else_is_parted(dtype: torch.dtype) -> None:
    layer = joined(Layer(bias=True).to(dtype))
    rows = torch.randn(3, 24).to(dtype)
    assert part_unlike(layer) == 0
    expected = layer(rows)
    joint = joints_of(layer)[0]
    # One weight less than the columns need, as if memory were not where we think it is.
    joint._weight = joint._weight.roll(1, 0)  # pyright: ignore
    assert not torch.equal(layer(rows), expected)
    assert part_unlike(layer) == 1
    assert torch.equal(layer(rows), expected)


def test_another_order_of_a_sum_is_no_difference() -> None:
    def backwards(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        order = torch.arange(rows.shape[-1] - 1, -1, -1)
        halves = [F.linear(rows[..., part], weight[:, part]) for part in order.split(12)]
        return halves[0] + halves[1]

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = joined(Layer().to(dtype))
        joint = joints_of(layer)[0]
        joint._product = backwards  # pyright: ignore
        rows = torch.randn(33, 24).to(dtype)
        alone = torch.cat([share._product(rows, share.weight) for share in joint.shares], -1)  # pyright: ignore
        assert not torch.equal(layer(rows), alone)
        assert part_unlike(layer) == 0


def test_siblings_lie_side_by_side_through_reload_and_release(
    lab: Any, make_plan: Callable[..., Plan]
) -> None:
    first, second = lab.tiny("gpt_oss"), lab.tiny("gpt_oss", seed=1)
    plan, arena = make_plan(first, dtype="bfloat16"), HostArena()
    model = build_model(plan, arena=arena)
    addresses = model.weights.addresses()
    groups = set(neighbours(model.hf).values())
    assert len(groups) == 2 * len(joints_of(model.hf)), "weights and biases"
    for names in groups:
        for one, following in pairwise(model.weights[name] for name in names):
            assert following.data_ptr() == one.data_ptr() + one.nbytes
    for path in (first, second):
        lab.fill(model, SafetensorsSource(path), plan)
        expected, _ = lab.load(path, dtype="bfloat16")
        assert torch.equal(lab.logits(model), lab.logits(expected))
        arena.release()
        arena.resume()
    assert model.weights.addresses() == addresses
    assert len({share for joint in joints_of(model.hf) for share in joint.shares}) == sum(
        isinstance(module, Share) for module in model.hf.modules()
    )
