# SPDX-License-Identifier: Apache-2.0
"""Triton's products are torch's up to the order of sums, and know no other row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

kernels: Any = pytest.importorskip(
    "tetrarch.kernels.matmul.triton", reason="pip install tetrarch[test-kernels]"
)

COUNTS = (1, 2, 3, 4, 7, 33, 64, 130)


def operands(
    device: torch.device, dtype: torch.dtype, columns: int = 48, width: int = 80
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((max(COUNTS), width), (columns, width), (columns,))
    made = (torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(one.to(device, dtype) for one in made)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_torchs_product(device: torch.device, dtype: torch.dtype, biased: bool) -> None:
    """Rows need not lie next to each other."""
    rows, weight, bias = operands(device, dtype)
    given, rounding = bias if biased else None, {torch.bfloat16: 2**-8}.get(dtype, 1e-5)
    want = rows.double() @ weight.double().mT + (bias.double() if biased else 0)
    wide = torch.cat((rows, rows), dim=1)[:, : rows.shape[1]]
    for count in (0, *COUNTS):
        got = kernels.multiply(wide[:count], weight, bias=given)
        torch.testing.assert_close(got.double(), want[:count], atol=1e-5, rtol=rounding)
    got = kernels.multiply_row(rows[:1], weight, bias=given)
    torch.testing.assert_close(got.double(), want[:1], atol=1e-5, rtol=rounding)


@pytest.mark.parametrize("shape", [(48, 80), (128, 2048), (96, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_do_not_know_how_many_there_are(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    if device.type == "cpu" and shape != (48, 80):
        pytest.skip("the interpreter sums in one way")
    rows, weight, bias = operands(device, dtype, *shape)
    whole = kernels.multiply(rows, weight, bias=bias)
    for count in COUNTS:
        assert torch.equal(kernels.multiply(rows[:count], weight, bias=bias), whole[:count])
        assert torch.equal(kernels.multiply(rows[-count:], weight, bias=bias), whole[-count:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_head_has_a_weight_of_its_own(device: torch.device, dtype: torch.dtype) -> None:
    """Of MLA: slices of one weight, one of them transposed."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(33, 4, 40, generator=generator).to(device, dtype)
    expand = torch.randn(4, 16 + 24, 32, generator=generator).to(device, dtype)
    for some, weight in ((rows[..., :16], expand[:, :16]), (rows[..., :32], expand[:, 16:].mT)):
        want = torch.einsum("thk,hkn->thn", some.double(), weight.double())
        for count in (1, 3, 33):
            got = kernels.multiply_heads(some[:count], weight)
            rounding = {torch.bfloat16: 2**-8}.get(dtype, 1e-5)
            torch.testing.assert_close(got.double(), want[:count], atol=1e-5, rtol=rounding)
            assert torch.equal(got, kernels.multiply_heads(some, weight)[:count])
