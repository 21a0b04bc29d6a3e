# SPDX-License-Identifier: Apache-2.0
"""Products of the same rows, made as one: queries, keys and values; gate and up.

A layer of transformers multiplies the same rows by several weights in turn, and most of what a
product of few rows costs is the call: one row of the demo model's attention takes 48 µs with all
three weights together and 57 one by one, four rows 45 and 130 (torch 2.13, one core of a Sapphire
Rapids Xeon). The layer's code stays as it is. It calls `q_proj`, `k_proj` and `v_proj` as ever; the
first of them multiplies by all three weights, which lie one after another in memory, and the others
find their columns of it.

A layer that calls them in another way gets what it asks for all the same, and gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from tetrarch.models.skeleton import swap_module

__all__ = [
    "Joint",
    "Linear",
    "Product",
    "Share",
    "join_products",
    "joints_of",
    "neighbours",
    "part_unlike",
]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # rows, weight, bias: as F.linear

# Children of one module that multiply the same rows, in the order in which they are called.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
_TRIED_ROWS = (1, 4, 33)


class Linear(nn.Linear):
    """A linear layer that takes over another one's parameters and multiplies by `product`."""

    bias: nn.Parameter | None  # which torch does not say

    def __init__(self, theirs: nn.Linear, product: Product) -> None:
        super().__init__(theirs.in_features, theirs.out_features, bias=False, device="meta")
        self.weight, self.bias = theirs.weight, theirs.bias
        self._product = product

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Return the product: (..., K) -> (..., N)."""
        return self._product(input, self.weight, self.bias)


class Share(Linear):
    """One of several linear layers that make one product."""

    def __init__(self, theirs: nn.Linear, product: Product, joint: Joint) -> None:
        super().__init__(theirs, product)
        self.joint, self._index = joint, len(joint.shares)
        joint.shares.append(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return this layer's columns of the product: (..., K) -> (..., N)."""
        columns = self.joint.columns(self._index, input)
        return super().forward(input) if columns is None else columns


class Joint:
    """The product that several layers make together.

    Attributes:
        shares: The layers, in the order in which they are called.
        is_apart: They have been found to differ, and each multiplies for itself.
    """

    def __init__(self, product: Product) -> None:
        self.shares: list[Share] = []
        self.is_apart = False
        self._product = product
        self._weight, self._bias = torch.empty(0), None
        self._widths: list[int] = []
        self._rows: Tensor | None = None  # of which there are columns that wait
        self._waiting: Sequence[Tensor] = ()

    def bind(self) -> None:
        """Find the matrix of all weights, once they have memory."""
        biases = [bias for share in self.shares if (bias := _bias(share)) is not None]
        self._weight = _whole([share.weight for share in self.shares])
        self._bias = _whole(biases) if biases else None
        self._widths = [share.out_features for share in self.shares]

    def columns(self, index: int, rows: Tensor) -> Tensor | None:
        """Return a layer's columns, where they wait or the layer is the first."""
        if index == 0 and not self.is_apart:
            self._rows, self._waiting = rows, self.multiply(rows)
        elif rows is not self._rows:
            return None
        columns = self._waiting[index]
        if index == len(self._waiting) - 1:
            self._rows, self._waiting = None, ()
        return columns

    def multiply(self, rows: Tensor) -> Sequence[Tensor]:
        """Return every layer's columns."""
        return self._product(rows, self._weight, self._bias).split(self._widths, dim=-1)


def join_products(model: nn.Module, product: Product) -> None:
    """Let the linear layers multiply by `product`, siblings together.

    Args:
        model: On `meta`; siblings' parameters are to be given memory side by side (`neighbours`),
            and their joints bound then.
        product: How rows are multiplied.
    """
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            swap_module(model, path, Linear(module, product))
    for module in list(model.modules()):
        children = dict(module.named_children())
        for names in _SIBLINGS:
            layers = [children.get(name) for name in names]
            if _are_alike(layers):
                joint = Joint(product)
                for name, layer in zip(names, layers, strict=True):
                    setattr(module, name, Share(layer, product, joint))


def _are_alike(layers: list[nn.Module | None]) -> TypeGuard[list[Linear]]:
    """Whether these are linear layers whose weights, and biases if any, fit into one matrix."""
    linear = [layer for layer in layers if type(layer) is Linear]
    kinds = {(each.in_features, each.weight.dtype, _bias(each) is None) for each in linear}
    return len(linear) == len(layers) and len(kinds) == 1


def joints_of(model: nn.Module) -> list[Joint]:
    """Return the joint products of a model."""
    shares = (module for module in model.modules() if isinstance(module, Share))
    return list(dict.fromkeys(share.joint for share in shares))


def neighbours(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return parameter → all those, in order, among which its rows are to lie in one matrix."""
    paths = {module: path for path, module in model.named_modules()}
    found: dict[str, tuple[str, ...]] = {}
    for joint in joints_of(model):
        for kind in ("weight", "bias")[: 1 if _bias(joint.shares[0]) is None else 2]:
            names = tuple(f"{paths[share]}.{kind}" for share in joint.shares)
            found |= dict.fromkeys(names, names)
    return found


@torch.no_grad()
def part_unlike(model: nn.Module) -> int:
    """Try each joint product on the loaded weights, and part those that are not as before.

    Random rows are multiplied together and one by one. A library may add up another shape's sums
    in another order; nothing else is allowed to differ.

    Returns:
        How many were parted.
    """
    joints = joints_of(model)
    for joint in joints:
        joint.is_apart = not all(_agrees(joint, count) for count in _TRIED_ROWS)
    return sum(joint.is_apart for joint in joints)


def _agrees(joint: Joint, num_rows: int) -> bool:
    weight = joint.shares[0].weight
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight)
    alone = [Linear.forward(share, rows) for share in joint.shares]
    return all(map(_differ_in_order_alone, joint.multiply(rows), alone))


def _differ_in_order_alone(found: Tensor, expected: Tensor) -> bool:
    """Whether two results may be the same sums of K products, added up in another order.

    Each is then off by a unit in the last place, and a small one, left over from large terms, by
    that of a typical result: libraries round the partial sums that they add up in the end.
    """
    eps = torch.finfo(expected.dtype).eps
    size = expected.float().square().mean().sqrt().item()
    return torch.allclose(found, expected, rtol=eps, atol=8 * eps * size, equal_nan=True)


def _bias(layer: nn.Linear) -> nn.Parameter | None:
    """Return a layer's bias, which torch declares as if every layer had one."""
    return layer.bias


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor whose rows are those of all parts; they lie one after another."""
    first = parts[0].detach()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())
