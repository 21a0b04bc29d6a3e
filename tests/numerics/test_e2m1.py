# SPDX-License-Identifier: Apache-2.0
"""The four-bit element against a search through all its values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tetrarch.numerics.e2m1 import E2M1_MAGNITUDES, pack, round_to_e2m1, unpack

# magnitude -> code. Every tie goes to the even code.
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def nearest(magnitude: float) -> float:
    """The definition: the nearest value, of two equally near the one with the even code."""
    distance = {
        (abs(min(magnitude, 6.0) - value), code % 2): value
        for code, value in enumerate(E2M1_MAGNITUDES)
    }
    return distance[min(distance)]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize(("magnitude", "code"), TIES.items())
def test_a_tie_goes_to_the_even_code_and_its_neighbours_do_not(magnitude: float, code: int) -> None:
    tie = torch.tensor([magnitude])
    below = torch.nextafter(tie, torch.tensor(0.0))
    above = torch.nextafter(tie, torch.tensor(9.0))
    rounded = round_to_e2m1(torch.cat((below, tie, above)))
    index = sorted(TIES).index(magnitude)
    low, high = E2M1_MAGNITUDES[index : index + 2]
    assert rounded.tolist() == [low, E2M1_MAGNITUDES[code], high]
    assert round_to_e2m1(-tie).item() == -E2M1_MAGNITUDES[code]


def test_rounding_equals_the_search_for_every_bf16_number() -> None:
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    finite = every[every.isfinite()]
    expected = torch.tensor([nearest(value) for value in finite.tolist()])
    assert len(finite) == 32640
    assert torch.equal(round_to_e2m1(finite), expected)
    assert torch.equal(bits(round_to_e2m1(-finite)), bits(-expected))


def test_rounding_equals_the_search_between_bf16_numbers() -> None:
    values = torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 7
    expected = torch.tensor([nearest(value) for value in values.tolist()])
    assert torch.equal(round_to_e2m1(values), expected)


def test_zero_keeps_its_sign_and_what_is_not_finite_saturates() -> None:
    special = torch.tensor([0.0, -0.0, -1e-45, math.inf, -math.inf, math.nan, -math.nan, 3e38])
    expected = torch.tensor([0.0, -0.0, -0.0, 6.0, -6.0, 6.0, 6.0, 6.0])
    assert torch.equal(bits(round_to_e2m1(special)), bits(expected))


def test_rounding_leaves_its_argument_alone() -> None:
    values = torch.tensor([0.3, -9.0, math.nan])
    before = values.clone()
    round_to_e2m1(values)
    assert torch.equal(bits(values), bits(before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_byte_survives_unpacking_and_packing(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    values = unpack(every, dtype)
    assert values.shape == (2, 256)
    assert values.dtype == dtype
    assert torch.equal(pack(values.float()), every)


def test_the_first_of_two_elements_is_in_the_low_nibble() -> None:
    assert unpack(torch.tensor([0xF1], dtype=torch.uint8)).tolist() == [0.5, -6.0]
    assert pack(torch.tensor([0.5, -6.0])).tolist() == [0xF1]
    assert pack(torch.tensor([-0.0, 0.0])).tolist() == [0x08]


def test_no_rows_pack_to_no_rows() -> None:
    assert pack(torch.empty(0, 32)).shape == (0, 16)
    assert unpack(torch.empty(0, 16, dtype=torch.uint8)).shape == (0, 32)


def test_a_transposed_matrix_packs_like_its_copy() -> None:
    values = round_to_e2m1(torch.randn(32, 16, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(pack(values.mT), pack(values.mT.contiguous()))
    assert torch.equal(unpack(pack(values.mT)), values.mT)
