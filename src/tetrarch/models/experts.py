# SPDX-License-Identifier: Apache-2.0
"""The expert modules of a Hugging Face model: how to know them, what they compute.

A class decorated with transformers' `@use_experts_implementation` says how it keeps its weights.
What it does between its two GEMMs it does not say; we find out by trying our formula against the
module's own function on random numbers, and refuse the model when no constants fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tetrarch.core.errors import CheckpointError
from tetrarch.moe.types import ExpertActivation

__all__ = ["ExpertShape", "expert_shape", "gated_product", "is_expert_module", "match_activation"]

_MARKS = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What a Hugging Face expert module is, whatever the layout it keeps its weights in."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: ExpertActivation
    has_bias: bool


def is_expert_module(module: nn.Module) -> bool:
    """Whether the module's class is decorated with `@use_experts_implementation`."""
    return vars(module).keys() >= _MARKS


def expert_shape(module: nn.Module) -> ExpertShape:
    """Return sizes and activation of an expert module; it may be on `meta`.

    Raises:
        CheckpointError: The experts compute something that ours do not.
    """
    marks = vars(module)
    if marks.get("has_post_expert_norm"):
        raise _refusal(module, "it normalises each expert's output")
    num_experts, *sizes = module.get_parameter("down_proj").shape
    intermediate, hidden = sizes if marks["is_transposed"] else reversed(sizes)
    return ExpertShape(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        activation=match_activation(module),
        has_bias=marks["has_bias"],
    )


def match_activation(module: nn.Module) -> ExpertActivation:
    """Find our activation that equals the module's own, bit for bit up to rounding.

    The constants to try are the numbers the module carries (gpt-oss: `alpha`, `limit`). Inputs
    reach ±12, so that a clamp at 7 takes effect.

    Raises:
        CheckpointError: None does.
    """
    gate, up = torch.empty(2, 4096).uniform_(-12, 12, generator=torch.Generator().manual_seed(0))
    theirs: Callable[[Tensor], Tensor]
    if vars(module)["has_gate"]:
        theirs = type(module)._apply_gate.__get__(module)  # pyright: ignore  # added by the decorator
        joined = torch.cat if vars(module)["is_concatenated"] else _alternate
        want = theirs(joined((gate, up)))
    else:
        want = module.get_submodule("act_fn")(up)
    for candidate in _candidates(module):
        got = gated_product(gate, up, candidate) if candidate.gated else up.clamp(min=0) ** 2
        if torch.allclose(got, want, rtol=1e-5, atol=1e-6):
            return candidate
    raise _refusal(module, "its activation is none of SwiGLU, clamped SwiGLU and squared ReLU")


def gated_product(gate: Tensor, up: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the gated activation as `ExpertActivation` defines it."""
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(min=-activation.limit, max=activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def _alternate(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(pair, dim=-1).flatten()


def _candidates(module: nn.Module) -> Iterator[ExpertActivation]:
    if not vars(module)["has_gate"]:
        yield ExpertActivation(gated=False)
        return
    numbers = sorted({float(n) for n in vars(module).values() if type(n) in (int, float) and n > 0})
    alphas, limits = [1.0, *numbers], [math.inf, *numbers]
    for alpha, beta, limit in itertools.product(alphas, (0.0, 1.0), limits):
        yield ExpertActivation(alpha=alpha, beta=beta, limit=limit)


def _refusal(module: nn.Module, why: str) -> CheckpointError:
    return CheckpointError(
        f"the experts of {type(module).__name__} are not supported",
        why=why,
        fix="serve another model, or add the formula to ExpertActivation and its runners",
    )
