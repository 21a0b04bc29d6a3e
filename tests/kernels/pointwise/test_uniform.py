# SPDX-License-Identifier: Apache-2.0
"""A function of one element gives the same bits wherever the element stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tetrarch.kernels.pointwise import uniform

Function = Callable[[Tensor], Tensor]
OURS: dict[str, tuple[Function, Function]] = {
    "sigmoid": (uniform.sigmoid, torch.sigmoid),
    "silu": (uniform.silu, F.silu),
    "rsqrt": (lambda x: uniform.rsqrt(x.abs()), lambda x: x.abs().rsqrt()),
}
# What ours are built from, and what a deterministic model may call directly.
TRUSTED: dict[str, Function] = {
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sqrt": lambda x: x.abs().sqrt(),
    "reciprocal": torch.reciprocal,
    "a third": lambda x: x / 3.0,
    "polar": lambda x: torch.view_as_real(torch.polar(torch.ones_like(x), x)),
}


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return (4 * torch.randn(4099, generator=torch.Generator().manual_seed(0))).to(dtype)


def num_differing(function: Function, values: Tensor) -> int:
    """Count the elements that come out otherwise alone, or in another layout, than among many."""
    whole = function(values)
    alone = torch.cat([function(values[i : i + 1].clone()) for i in range(0, len(values), 7)])
    strided = torch.empty(len(values), 3, dtype=values.dtype)
    strided[:, 1] = values
    return int((alone != whole[::7]).sum() + (function(strided[:, 1]) != whole).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_an_element_does_not_know_its_place(name: str, dtype: torch.dtype) -> None:
    assert num_differing(OURS[name][0], numbers(dtype)) == 0


@pytest.mark.parametrize("name", TRUSTED)
def test_what_they_are_built_from_does_not_either(name: str) -> None:
    assert num_differing(TRUSTED[name], numbers()) == 0


def test_torchs_own_would_fail() -> None:
    """On this machine at least one does; elsewhere all may agree, and ours are still right."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        pytest.skip("no vector instructions whose scalar twin rounds otherwise are known here")
    assert any(num_differing(torchs, numbers()) for _, torchs in OURS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_they_are_torchs_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    ours, torchs = OURS[name]
    extremes = torch.tensor([0.0, -0.0, 1e30, -1e30, 90.0, -90.0]).to(dtype)
    for values in (numbers(dtype), extremes):
        torch.testing.assert_close(ours(values), torchs(values))


def test_in_place_means_in_place() -> None:
    values = numbers()
    want = uniform.silu(values)
    assert uniform.silu(values, inplace=True) is values
    assert torch.equal(values, want)
