# SPDX-License-Identifier: Apache-2.0
"""The definition is what transformers' routers compute."""

from __future__ import annotations

import pytest
import torch
from transformers import Glm4MoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tetrarch.kernels.route.reference import RouteRule, route


@pytest.mark.parametrize("renormalise", [False, True])
def test_of_softmax(renormalise: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=renormalise
    )
    router = Qwen3MoeTopKRouter(config).requires_grad_(False)
    router.weight.normal_()
    logits, weights, ids = router(torch.randn(50, 32))
    got = route(logits, RouteRule(top_k=4, score="softmax", renormalise=renormalise))
    assert torch.equal(got[0], ids.int())
    assert torch.equal(got[1], weights)


def test_of_sigmoid_with_a_bias_for_the_choice() -> None:
    config = Glm4MoeConfig(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router = Glm4MoeTopkRouter(config).requires_grad_(False)
    router.weight.normal_()
    bias = router.e_score_correction_bias.normal_()
    logits, weights, ids = router(torch.randn(50, 32))
    rule = RouteRule(top_k=4, score="sigmoid", renormalise=True, epsilon=1e-20, scale=2.5)
    got = route(logits, rule, bias=bias)
    assert torch.equal(got[0].sort().values, ids.int().sort().values)
    order, theirs = got[0].argsort(), ids.argsort()
    torch.testing.assert_close(got[1].gather(1, order), weights.gather(1, theirs))
