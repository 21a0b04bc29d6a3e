# SPDX-License-Identifier: Apache-2.0
"""Rounding by addition is rounding: every tie, its neighbours, and what is not a number."""

# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tetrarch.numerics.e2m1 import E2M1_MAGNITUDES, pack, round_to_e2m1
from tetrarch.numerics.fp8 import round_to_e4m3

triton: Any = pytest.importorskip("triton", reason="pip install tetrarch[test-kernels]")
tl: Any = pytest.importorskip("triton.language")
blocks: Any = pytest.importorskip("tetrarch.kernels.quantize.triton_blocks")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NaN in numpy


@triton.jit
def round_all(x, e2m1, e4m3, e4m3_bytes, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    tl.store(e2m1 + at, blocks.round_to_e2m1(values))
    scales = blocks.round_to_e4m3(values)
    tl.store(e4m3 + at, scales)
    tl.store(e4m3_bytes + at, blocks.e4m3_bytes(scales))


@triton.jit
def write_codes(x, words, ROWS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None, None], tl.arange(0, 8)[None, None, :]
    numbers = tl.load(x + row * 8 + column)
    tl.store(words + tl.arange(0, ROWS)[:, None], blocks.code_words(numbers))


def magnitudes() -> Tensor:
    """Every E4M3 value and every midpoint of two, with FP32's neighbours, and the extremes."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = (values[1:] + values[:-1]) / 2
    e2m1 = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    exact = torch.cat((values, middles, e2m1, (e2m1[1:] + e2m1[:-1]) / 2)).float()
    beside = [torch.nextafter(exact, torch.tensor(to)) for to in (0.0, math.inf)]
    extremes = torch.tensor([0.0, 1e-45, 1e-38, 7.0, 464.0, 465.0, 3e38, math.inf, math.nan])
    return torch.cat((exact, *beside, extremes))


def test_both_roundings_equal_their_definitions(device: torch.device) -> None:
    values = torch.nn.functional.pad(magnitudes(), (0, 1024 - magnitudes().numel())).to(device)
    e2m1, e4m3 = torch.empty_like(values), torch.empty_like(values)
    octets = torch.empty(1024, dtype=torch.uint8, device=device)
    round_all[(1,)](values, e2m1, e4m3, octets, SIZE=1024, enable_fp_fusion=False)
    assert torch.equal(e2m1, round_to_e2m1(values))
    defined = round_to_e4m3(values)
    assert torch.equal(octets, defined.view(torch.uint8))
    assert torch.equal(e4m3.isnan(), values.isnan())
    assert torch.equal(e4m3.nan_to_num(), defined.float().nan_to_num())


def test_words_hold_the_bytes_of_pack(device: torch.device) -> None:
    """All 16 codes, -0 among them, in every place of a word."""
    signed = [sign * magnitude for sign in (1.0, -1.0) for magnitude in E2M1_MAGNITUDES]
    numbers = torch.tensor([signed[(i + j) % 16] for i in range(16) for j in range(8)])
    words = torch.empty(16, dtype=torch.int32, device=device)
    write_codes[(1,)](numbers.to(device), words, ROWS=16)
    assert torch.equal(words.cpu().view(torch.uint8), pack(numbers))
