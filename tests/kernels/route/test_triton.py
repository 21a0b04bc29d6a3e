# SPDX-License-Identifier: Apache-2.0
"""The Triton router chooses as the torch definition does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.kernels.route import reference
from tetrarch.kernels.route.reference import RouteRule

kernels: Any = pytest.importorskip(
    "tetrarch.kernels.route.triton", reason="pip install tetrarch[test-kernels]"
)

RULES = [
    RouteRule(top_k=8, score="softmax", renormalise=True, round_to=torch.bfloat16),
    RouteRule(top_k=3, score="softmax", renormalise=False),
    RouteRule(top_k=6, score="sigmoid", renormalise=True, epsilon=1e-20, scale=2.5),
    RouteRule(top_k=1, score="sigmoid", renormalise=False),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.score}-{rule.top_k}")
@pytest.mark.parametrize(("tokens", "experts"), [(1, 128), (7, 72), (33, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_and_weights_are_the_references(
    device: torch.device,
    rule: RouteRule,
    tokens: int,
    experts: int,
    dtype: torch.dtype,
    biased: bool,
) -> None:
    """Logits are spread so that no two scores are equal in FP32, and weights differ by rounding."""
    generator = torch.Generator().manual_seed(tokens)
    steps = torch.rand(tokens, experts, generator=generator).argsort(-1)
    logits = ((steps - experts / 2) / 16).to(device, dtype)
    bias = torch.randn(experts, generator=generator).mul(0.01).to(device) if biased else None
    ids, weights = kernels.route(logits, rule, bias=bias)
    want_ids, want_weights = reference.route(logits, rule, bias=bias)
    assert torch.equal(ids, want_ids)
    rounding = 2**-8 if rule.round_to is torch.bfloat16 else 1e-6
    torch.testing.assert_close(weights, want_weights, atol=1e-12, rtol=rounding)


def test_among_equals_the_lower_expert_is_chosen(device: torch.device) -> None:
    logits = torch.zeros(2, 16, device=device)
    logits[1, 9:12] = 1.0
    rule = RouteRule(top_k=4, score="softmax", renormalise=True)
    ids, _ = kernels.route(logits, rule)
    assert ids.tolist() == [[0, 1, 2, 3], [9, 10, 11, 0]]
    assert ids.tolist() == reference.route(logits, rule)[0].tolist()


def test_no_token_needs_no_launch(device: torch.device) -> None:
    ids, weights = kernels.route(torch.empty(0, 8, device=device), RULES[1])
    assert ids.shape == weights.shape == (0, 3)
