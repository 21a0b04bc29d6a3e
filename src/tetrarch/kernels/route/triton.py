# SPDX-License-Identifier: Apache-2.0
"""A token's experts and their weights in one launch, in Triton.

torch takes a softmax or a sigmoid, a top-k of two or more launches, a gather and a division.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0913

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.kernels.route.reference import RouteRule

__all__ = ["route"]


@triton.jit
def _route_token(
    logits,
    bias,
    topk_ids,
    topk_weights,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PICKS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    """Route one token: the larger score first, the lower expert among equals."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    exists = expert < NUM_EXPERTS
    row = tl.load(logits + token * NUM_EXPERTS + expert, mask=exists, other=-float("inf"))
    row = row.to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-row))
    else:
        score = tl.exp(row - tl.max(row, axis=0))
        score = score / tl.sum(score, axis=0)
    left = score
    if bias is not None:
        left += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    left = tl.where(exists, left, -float("inf"))
    pick = tl.arange(0, PICKS)
    ids = tl.zeros((PICKS,), tl.int32)
    weights = tl.zeros((PICKS,), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        at = tl.min(tl.where(left == best, expert, EXPERTS), axis=0)
        found = tl.sum(tl.where(expert == at, score, 0.0), axis=0) if bias is not None else best
        ids = tl.where(pick == k, at, ids)
        weights = tl.where(pick == k, found, weights)
        left = tl.where(expert == at, -float("inf"), left)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + EPSILON)
    weights = (weights * scale).to(ROUND_TO).to(tl.float32)
    tl.store(topk_ids + token * TOP_K + pick, ids, mask=pick < TOP_K)
    tl.store(topk_weights + token * TOP_K + pick, weights, mask=pick < TOP_K)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def route(logits: Tensor, rule: RouteRule, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts; kernels/route/reference.py says how.

    Args:
        logits: (T, E), contiguous.
        rule: How.
        bias: (E,), added to scores for the choice alone.

    Returns:
        (T, K) int32 and (T, K) fp32.
    """
    tokens, experts = logits.shape
    ids = logits.new_empty(tokens, rule.top_k, dtype=torch.int32)
    weights = logits.new_empty(tokens, rule.top_k, dtype=torch.float32)
    if tokens == 0:
        return ids, weights
    block = triton.next_power_of_2(experts)
    _route_token[(tokens,)](
        logits,
        bias,
        ids,
        weights,
        rule.scale,
        NUM_EXPERTS=experts,
        TOP_K=rule.top_k,
        EXPERTS=block,
        PICKS=triton.next_power_of_2(rule.top_k),
        SIGMOID=rule.score == "sigmoid",
        RENORMALISE=rule.renormalise,
        EPSILON=rule.epsilon,
        ROUND_TO=_TYPES[rule.round_to],
        num_warps=max(1, min(4, block // 128)),
    )
    return ids, weights
