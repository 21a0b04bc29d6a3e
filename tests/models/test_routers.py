# SPDX-License-Identifier: Apache-2.0
"""Our router takes the place of those that it agrees with, and of no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tetrarch.models.routers import Router, swap_routers
from tetrarch.models.sources import SafetensorsSource

ALIKE = [
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "minimax_m2",
]


def routers(model: Any) -> list[Router]:
    return [module for module in model.hf.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("family", ALIKE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_router_of_the_family_is_replaced_and_logits_stay(
    lab: Any, family: str, dtype: str
) -> None:
    """In FP32; in BF16 two experts with the same logits may change places."""
    model, _ = lab.load(lab.tiny(family), dtype=dtype)
    want = lab.logits(model)
    assert swap_routers(model.hf) == len(model.experts) == len(routers(model))
    if dtype == "float32":
        torch.testing.assert_close(lab.logits(model), want, atol=2e-6, rtol=1e-5)


def test_a_router_that_limits_groups_stays(lab: Any) -> None:
    model, _ = lab.load(lab.tiny("deepseek_v3"))
    assert swap_routers(model.hf) == 0
    assert not routers(model)


def test_it_reads_what_a_reload_writes(lab: Any) -> None:
    first, second = lab.tiny("qwen3_moe"), lab.tiny("qwen3_moe", seed=1)
    model, _ = lab.load(first)
    swap_routers(model.hf)
    lab.fill(model, SafetensorsSource(second), lab.plan(second))
    torch.testing.assert_close(
        lab.logits(model), lab.logits(lab.load(second)[0]), atol=2e-6, rtol=1e-5
    )


class Odd(nn.Module):
    """Qwen3's router, but for the one thing that a test changes."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32), requires_grad=False)
        self.top_k, self._change = 2, change

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.mT
        scores = logits.softmax(-1)
        if self._change == "hotter":
            scores = (2 * logits).softmax(-1)
        values, ids = scores.topk(2, largest=self._change != "smallest")
        if self._change == "shifted":
            ids = (ids + 1) % 8
        values = values / values.sum(-1, keepdim=True)
        return logits, values * (1.01 if self._change == "scaled" else 1.0), ids


@pytest.mark.parametrize(
    ("change", "swapped"),
    [("nothing", 1), ("hotter", 0), ("smallest", 0), ("shifted", 0), ("scaled", 0)],
)
def test_any_other_rule_is_noticed(change: str, swapped: int) -> None:
    torch.manual_seed(0)
    assert swap_routers(nn.ModuleDict({"gate": Odd(change)})) == swapped
