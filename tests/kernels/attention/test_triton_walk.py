# SPDX-License-Identifier: Apache-2.0
"""Sums that are rescaled on their way have the bits of sums that were not."""

from __future__ import annotations

import os

import pytest
import torch

from interpreter import repair

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
walk = pytest.importorskip("tetrarch.kernels.attention.triton_walk")
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _powers(exponents, out, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    at = tl.arange(0, SIZE)
    tl.store(out + at, walk.power(tl.load(exponents + at)))


@triton.jit
def _merge_all(parts, totals, tops, out, COUNT: tl.constexpr):  # noqa: ANN001, ANN202, N803
    at = tl.arange(0, 16)
    acc, total, top = walk.empty_sum(16, 16)
    for index in range(COUNT):
        part = tl.load(parts + index * 256 + at[:, None] * 16 + at[None, :])
        part_total, part_top = tl.load(totals + index * 16 + at), tl.load(tops + index * 16 + at)
        acc, total, top = walk.merge(acc, total, top, part, part_total, part_top)
    result = walk.finish(acc, total, top, total, False)
    tl.store(out + at[:, None] * 16 + at[None, :], result)


def test_powers_of_two_are_exact(device: torch.device) -> None:
    exponents = [0.0, -1.0, -2.0, -24.0, -125.0, -126.0, -127.0, float("-inf")]
    got = torch.empty(8, device=device)
    _powers[(1,)](torch.tensor(exponents, device=device), got, SIZE=8)
    want = [2.0**exponent if exponent >= -126 else 0.0 for exponent in exponents]
    assert got.tolist() == want


def test_a_running_maximum_leaves_no_trace(device: torch.device) -> None:
    torch.manual_seed(0)
    parts, totals = torch.randn(6, 16, 16), torch.rand(6, 16) + 1
    tops = torch.randint(-30, 30, (6, 16)).float()
    tops[2, :4], totals[2, :4], parts[2, :4] = float("-inf"), 0, 0  # a span that is not seen
    out = torch.empty(16, 16, device=device)
    _merge_all[(1,)](parts.to(device), totals.to(device), tops.to(device), out, COUNT=6)
    weights = (tops - tops.amax(0)).exp2()  # every span's, the maximum known from the start
    acc, total = torch.zeros(16, 16), torch.zeros(16)
    for part, part_total, weight in zip(parts, totals, weights, strict=True):
        acc, total = acc + part * weight[:, None], total + part_total * weight
    want = acc / total[:, None]
    if device.type == "cpu":
        assert torch.equal(out, want)
    else:  # a GPU divides with an error of 2 ulp
        torch.testing.assert_close(out.cpu(), want, rtol=2.0**-21, atol=0)
