# SPDX-License-Identifier: Apache-2.0
"""A norm is replaced where ours gives the same bits, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tetrarch.config.plan import Plan
from tetrarch.models.build import build_model
from tetrarch.models.norms import RootMeanSquareNorm, fuse_norms

CPU = torch.device("cpu")


class Theirs(nn.Module):
    """A norm as transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class WeighsFirst(Theirs):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(x.dtype)


class AddsOne(Theirs):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Theirs.forward(self, x) / self.weight


class TakesAGate(Theirs):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


def fused(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(norm.to(dtype))
    fuse_norms(model, dtype=dtype, device=CPU)
    return model[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 100, 2048])
def test_the_replacement_gives_the_same_bits_and_shares_the_weight(
    width: int, dtype: torch.dtype
) -> None:
    theirs = Theirs(width).to(dtype)
    ours = fused(theirs, dtype)
    assert isinstance(ours, RootMeanSquareNorm)
    assert ours.weight is theirs.weight
    for shape in ((1, 1), (2, 3), (1, 5, 4)):
        x = (torch.randn(*shape, width) * 30).to(dtype)
        assert torch.equal(ours(x), theirs(x))


def test_a_norm_that_computes_something_else_stays() -> None:
    for other in (WeighsFirst(64), AddsOne(64), TakesAGate(64)):
        assert fused(other, torch.bfloat16) is other
    assert isinstance(fused(WeighsFirst(64), torch.float32), RootMeanSquareNorm)


def test_one_family_is_fused_throughout_and_one_keeps_its_own(
    tiny_checkpoint: Callable[..., object], make_plan: Callable[..., Plan]
) -> None:
    def norms(family: str) -> set[str]:
        model = build_model(make_plan(tiny_checkpoint(family).path, dtype="bfloat16")).hf
        return {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}

    assert norms("qwen3_moe") == {"RootMeanSquareNorm"}
    assert norms("gpt_oss") == {"GptOssRMSNorm"}
