# SPDX-License-Identifier: Apache-2.0
"""A single row is multiplied in Triton on a GPU; whatever is not a single row, by torch."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

from interpreter import repair
from tetrarch.core.registry import Registry
from tetrarch.models import one_row
from tetrarch.models.one_row import one_row as multiply

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
pytest.importorskip("tetrarch.kernels.matmul.triton")
SHAPES = [(48,), (1, 48), (1, 1, 48)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_keeps_its_shape(
    shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    where = Registry({"cpu": "tetrarch.kernels.matmul.triton:multiply_row"})
    monkeypatch.setattr(one_row, "_PRODUCTS", where)
    monkeypatch.setattr(F, "linear", lambda *_: calls.append(1))
    row, weight, bias = torch.randn(shape), torch.randn(72, 48), torch.randn(72)
    got = multiply(row, weight, bias if biased else None)
    want = row @ weight.mT + (bias if biased else 0)
    assert not calls
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 48), (2, 48), (1, 3, 48)], ids=str)
def test_other_numbers_are_torchs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "_PRODUCTS", Registry({"cpu": "none:none"}))
    rows, weight = torch.randn(shape), torch.randn(72, 48)
    assert torch.equal(multiply(rows, weight), F.linear(rows, weight))


def test_on_a_cpu_it_is_torchs() -> None:
    row, weight = torch.randn(1, 48), torch.randn(72, 48)
    assert torch.equal(multiply(row, weight), F.linear(row, weight))
