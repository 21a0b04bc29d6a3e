# SPDX-License-Identifier: Apache-2.0
"""A row's sum is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

kernels: Any = pytest.importorskip(
    "tetrarch.kernels.pointwise.triton", reason="pip install tetrarch[test-kernels]"
)


@pytest.mark.parametrize("width", [3, 768, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_sum_is_its_own(device: torch.device, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(2, 17, width, generator=generator).to(device, dtype)
    whole = kernels.row_sum(rows)
    torch.testing.assert_close(whole.double(), rows.double().sum(-1), atol=1e-4, rtol=1e-5)
    for count in (0, 1, 2, 7):
        assert torch.equal(kernels.row_sum(rows[:, :count]), whole[:, :count])
