# SPDX-License-Identifier: Apache-2.0
"""Each group's rows meet their own weight."""

from __future__ import annotations

import pytest
import torch

from tetrarch.kernels.grouped_gemm.reference import grouped_gemm
from tetrarch.numerics.nvfp4 import fake_quant_per_token


@pytest.mark.parametrize("counts", [((0, 3), (2, 2)), ((3, 5),), ((0, 1), (1, 1), (3, 1)), ()])
def test_groups_equal_a_float64_product(counts: tuple[tuple[int, int], ...]) -> None:
    """Groups without rows are never asked for their weight, which may cost a decoding."""
    torch.manual_seed(0)
    owner = torch.tensor([group for group, count in counts for _ in range(count)], dtype=torch.int)
    weights, rows = torch.randn(4, 32, 8), torch.randn(len(owner), 32)
    asked: list[int] = []

    def weight(group: int) -> torch.Tensor:
        asked.append(group)
        return weights[group]

    out = torch.full((len(owner), 8), torch.nan)
    assert grouped_gemm(rows, counts, weight=weight, out=out) is out
    want = torch.einsum("nk,nko->no", rows.double(), weights[owner].double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert asked == [group for group, _ in counts]


def test_sums_of_nvfp4_products_are_exact() -> None:
    """Gaussian rows in NVFP4 on both sides: FP32 sums equal float64's, whatever the row count."""
    torch.manual_seed(0)
    rows, _ = fake_quant_per_token(torch.randn(33, 2048))
    weight = fake_quant_per_token(torch.randn(16, 2048))[0].mT
    out = grouped_gemm(rows, [(0, 33)], weight=lambda _: weight, out=torch.empty(33, 16))
    assert torch.equal(out.double(), rows.double() @ weight.double())
    one = grouped_gemm(rows[:1], [(0, 1)], weight=lambda _: weight, out=torch.empty(1, 16))
    assert torch.equal(one[0], out[0])
