# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum whose matrices are orthogonalised by a Newton-Schulz iteration.

K. Jordan et al., 2024. Matrices of one shape are stacked, so that a step is a few batched GEMMs;
stacks of experts are batches already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Muon"]

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: fast, singular values end in 0.7-1.2
_ITERATIONS = 5
_UPDATE_RMS = 0.2  # scales an update to the size of AdamW's (Moonlight, 2025)


class Muon(torch.optim.Optimizer):
    """For hidden matrices only; embeddings, head, routers and vectors belong to AdamW."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  no closures here
        """Update every group."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(shape, parameters, group)

    def _step_shape(
        self, shape: tuple[int, ...], parameters: list[nn.Parameter], group: dict[str, float]
    ) -> None:
        gradients = torch.cat([_gradient(p).reshape(-1, *shape) for p in parameters])
        state = self.state[parameters[0]]
        average = state.setdefault("average", torch.zeros_like(gradients))
        average.lerp_(gradients, 1 - group["momentum"])
        update = _orthogonal(gradients.lerp(average, group["momentum"]))
        update *= -group["lr"] * _UPDATE_RMS * math.sqrt(max(shape))
        at = 0
        for parameter in parameters:
            count = parameter.numel() // (shape[0] * shape[1])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update[at : at + count].reshape(parameter.shape))
            at += count


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _orthogonal(stack: Tensor) -> Tensor:
    """Push the singular values of every matrix of (N, rows, columns) towards 1."""
    wide = stack.bfloat16()
    flip = wide.shape[-2] > wide.shape[-1]
    x = wide.mT if flip else wide
    x = x / (x.float().flatten(-2).norm(dim=-1)[..., None, None] + 1e-7).to(x.dtype)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if flip else x).to(stack.dtype)
