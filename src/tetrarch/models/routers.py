# SPDX-License-Identifier: Apache-2.0
"""Routers in one launch behind their product, where the choice is the same.

transformers spells a router out: scores, top-k, gather, sum, division, which a GPU runs as six to
nine kernels. Most are the same rule with other switches. Which switches is not read off a class's
attributes but tried: on random rows and the loaded weights, against the router that is there. A
router that no switches agree with, as one that limits groups of experts, stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tetrarch.core.registry import Registry
from tetrarch.kernels.route.reference import RouteRule
from tetrarch.models.one_row import one_row
from tetrarch.models.skeleton import swap_module

__all__ = ["Router", "swap_routers"]

_ROUTES = Registry(
    {
        "cpu": "tetrarch.kernels.route.reference:route",
        "cuda": "tetrarch.kernels.route.triton:route",
    }
)
_ROWS = 64  # of a trial
_MEETING = 1  # of them in which two experts may be so close that rounding decides
_SELECTION_BIAS = "e_score_correction_bias"


@torch.library.custom_op("tetrarch::route", mutates_args=())
def _route(  # noqa: PLR0913 - an operator takes tensors and numbers, no objects
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    renormalise: bool,  # noqa: FBT001
    epsilon: float,
    scale: float,
    round_to: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rule = RouteRule(
        top_k=top_k,
        score=score,
        renormalise=renormalise,
        epsilon=epsilon,
        scale=scale,
        round_to=round_to,
    )
    return _ROUTES[logits.device.type](logits, rule, bias=bias)


@_route.register_fake
def _(logits: Tensor, _bias: Tensor | None, top_k: int, *_rule: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


class Router(nn.Module):
    """Takes a router's place, its parameters and their names, and its signature."""

    bias: nn.Parameter | None  # (E,), of the logits
    e_score_correction_bias: Tensor | None  # (E,), of the choice alone

    def __init__(self, theirs: nn.Module, rule: RouteRule, logits: torch.dtype) -> None:
        super().__init__()
        parameters, buffers = dict(theirs.named_parameters()), dict(theirs.named_buffers())
        self.weight = theirs.get_parameter("weight")
        self.register_parameter("bias", parameters.get("bias"))
        self.register_buffer(_SELECTION_BIAS, buffers.get(_SELECTION_BIAS))
        self._rule, self._dtype = rule, logits

    def forward(
        self, hidden_states: Tensor, selection: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (T, E), weights (T, K) fp32 and experts (T, K) int32.

        Args:
            hidden_states: (..., H).
            selection: (E,), added to scores for the choice alone, where the router has none itself.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).to(self._dtype)
        bias = None if self.bias is None else self.bias.to(self._dtype)
        logits = one_row(rows, self.weight.to(self._dtype), bias)
        rule = self._rule
        ids, weights = torch.ops.tetrarch.route(
            logits,
            self.e_score_correction_bias if selection is None else selection,
            rule.top_k,
            rule.score,
            rule.renormalise,
            rule.epsilon,
            rule.scale,
            rule.round_to,
        )
        return logits, weights, ids


def swap_routers(model: nn.Module) -> int:
    """Replace each router that one of ours agrees with.

    Args:
        model: Loaded.

    Returns:
        How many were replaced.
    """
    found = [(path, module) for path, module in model.named_modules() if _is_router(module)]
    swapped = 0
    for path, theirs in found:
        ours = _agreeing(theirs)
        if ours is not None:
            swap_module(model, path, ours)
            swapped += 1
    return swapped


def _is_router(module: nn.Module) -> bool:
    """Whether it looks like a router of transformers: a matrix, and how many experts to choose."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    is_matrix = weight is not None and weight.ndim == 2
    return is_matrix and isinstance(vars(module).get("top_k"), int)


@torch.no_grad()
def _agreeing(theirs: nn.Module) -> Router | None:
    """Return our router that chooses as theirs does on random rows."""
    weight = theirs.get_parameter("weight")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, weight.shape[1], generator=generator).to(weight)
    given = [rows]
    if _SELECTION_BIAS not in dict(theirs.named_buffers()) and _takes_selection(theirs):
        given.append(torch.randn(len(weight), generator=generator).mul(0.1).to(weight.device))
    want = theirs(*given)
    for rule in _rules(theirs, want[0].dtype):
        ours = Router(theirs, rule, want[0].dtype)
        if _same(ours(*given), want):
            return ours
    return None


def _takes_selection(module: nn.Module) -> bool:
    return _SELECTION_BIAS in module.forward.__code__.co_varnames


def _rules(theirs: nn.Module, logits: torch.dtype) -> Iterator[RouteRule]:
    held = vars(theirs)
    scales = {1.0, float(held.get("routed_scaling_factor") or 1.0)}
    kinds = itertools.product(
        ("softmax", "sigmoid"), (True, False), scales, {logits, torch.float32}
    )
    for score, renormalise, scale, round_to in kinds:
        yield RouteRule(
            top_k=held["top_k"],
            score=score,
            renormalise=renormalise,
            epsilon=1e-20 if score == "sigmoid" else 0.0,  # a softmax's largest is at least 1 / E
            scale=scale,
            round_to=round_to,
        )


def _same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Whether both choose alike, in any order, and weigh alike up to rounding.

    Of two experts with equal logits either may be chosen.
    """
    by_logit = [theirs[0].float().gather(1, ids.long()) for ids in (ours[2], theirs[2])]
    orders = [found.argsort(dim=1, stable=True) for found in by_logit]
    chosen = [found.gather(1, order) for found, order in zip(by_logit, orders, strict=True)]
    weights = [
        one[1].float().gather(1, order) for one, order in zip((ours, theirs), orders, strict=True)
    ]
    eps = torch.finfo(theirs[1].dtype).eps
    alike = chosen[0].eq(chosen[1]).all(1)
    close = torch.isclose(*weights, rtol=2 * eps + 4e-6, atol=eps / 16).all(1)
    return int((alike & close).sum()) >= len(alike) - _MEETING
