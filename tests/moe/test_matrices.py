# SPDX-License-Identifier: Apache-2.0
"""A tensor that cannot be a weight is described, one that can is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tetrarch.moe.matrices import Values, bias_flaw, matrix_flaw, scale_flaw


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite_matrices_of_the_right_shape_have_no_flaw(
    serialize: Any, dtype: torch.dtype
) -> None:
    matrix = torch.randn(8, 32).to(dtype)
    assert matrix_flaw(matrix, (8, 32)) is None
    assert matrix_flaw(serialize(matrix), (8, 32)) is None
    assert bias_flaw(matrix[0], 32) is None
    extreme = matrix.clone()
    extreme[0, 0] = torch.finfo(dtype).max
    values = Values()
    values.note("extreme", extreme)
    values.note("serialized", serialize(matrix))
    assert values.flaw() is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_element_is_found_wherever_it_is(bad: float) -> None:
    for row, column in ((0, 0), (3, 17), (7, 31)):
        matrix = torch.randn(8, 32).bfloat16()
        matrix[row, column] = bad
        values = Values()
        values.note("good", torch.zeros(3))
        values.note("bad", matrix)
        assert values.flaw() == ("bad", "it holds NaN or infinite values")


def test_values_are_looked_at_once() -> None:
    values = Values()
    values.note("good", torch.zeros(3))
    assert values.flaw() is None
    values.note("bad", torch.full((2,), torch.nan))
    assert values.flaw() is not None


def test_shapes_and_dtypes_are_quoted(serialize: Any) -> None:
    matrix = torch.randn(8, 32)
    assert matrix_flaw(matrix, (32, 8)) == (
        "it is (8, 32) torch.float32, expected (32, 8) bf16, fp16 or fp32"
    )
    assert matrix_flaw(matrix.double(), (8, 32)) is not None
    encoded = serialize(matrix)
    assert matrix_flaw(encoded, (8, 64)) == (
        "its codes are (8, 16) torch.uint8, expected (8, 32) torch.uint8"
    )
    groups_of_32 = replace(encoded, block_scale=encoded.block_scale[:, :1])
    assert matrix_flaw(groups_of_32, (8, 32)) == (
        "its block scales (groups of 16) are (8, 1) torch.float8_e4m3fn, "
        "expected (8, 2) torch.float8_e4m3fn"
    )
    assert bias_flaw(matrix, 32) is not None


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFE, 0xFF])
def test_a_block_scale_that_is_nan_or_negative_is_found(serialize: Any, byte: int) -> None:
    encoded = serialize(torch.randn(8, 32))
    scales = encoded.block_scale.view(torch.uint8).clone()
    scales[5, 1] = byte
    damaged, values = replace(encoded, block_scale=scales.view(torch.float8_e4m3fn)), Values()
    assert matrix_flaw(damaged, (8, 32)) is None
    values.note("it", damaged)
    assert values.flaw() == ("it", "its block scales hold NaN or negative values")


def test_scales_are_one_positive_finite_number() -> None:
    assert scale_flaw("global", torch.tensor(1e-6)) is None
    assert scale_flaw("global", torch.tensor([1e-6])) is None
    for bad in (0.0, -1.0, torch.nan, torch.inf):
        assert scale_flaw("input", torch.tensor(bad)) is not None
    assert scale_flaw("input", torch.ones(2)) == (
        "its input scale is (2,) torch.float32, expected one float32"
    )
    assert scale_flaw("input", torch.ones(1, dtype=torch.bfloat16)) is not None
