# SPDX-License-Identifier: Apache-2.0
"""The rounding of one block against the rule worked out by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tetrarch.core.errors import ConfigError, ShapeError
from tetrarch.numerics.blocks import (
    BLOCK,
    check_encoded,
    check_recipe,
    check_values,
    quantize,
    quantize_per_row,
    scaled,
)
from tetrarch.numerics.contract import Recipe

ONE = torch.tensor(1.0)


def _row(*values: float) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (BLOCK - len(values))]])


def test_the_largest_of_a_block_becomes_six() -> None:
    numbers, scales = quantize(_row(12.0, -6.0, 3.0), ONE, recipe=None)
    assert scales.item() == 2.0
    assert numbers[0, 0, :3].tolist() == [6.0, -3.0, 1.5]
    assert scaled(numbers.flatten(1), scales[..., 0])[0, :3].tolist() == [12.0, -6.0, 3.0]


def test_ties_go_to_the_even_code() -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    numbers, scales = quantize(_row(6.0, *midpoints, *(-m for m in midpoints)), ONE, recipe=None)
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert scales.item() == 1.0
    assert numbers[0, 0, 1:8].tolist() == expected
    assert numbers[0, 0, 8:15].tolist() == [-value for value in expected]
    assert math.copysign(1.0, numbers[0, 0, 8].item()) == -1.0  # a negative that rounds to zero


def test_a_block_whose_scale_underflows_saturates_and_decodes_to_zero() -> None:
    numbers, scales = quantize(_row(2.0**-14, -(2.0**-14)), ONE, recipe=None)
    assert scales.item() == 0.0
    assert numbers[0, 0, :2].tolist() == [6.0, -6.0]
    assert not (numbers * scales).any()


def test_each_row_has_the_scale_of_its_own_largest() -> None:
    rows = torch.cat([_row(2688.0), _row(-1.0, 0.5), _row(0.0)])
    numbers, scales, token_scale = quantize_per_row(rows, 1 / 2688, recipe=None)
    assert scales.flatten().tolist() == [448.0, 448.0, 0.0]
    assert numbers[:2, 0, 0].tolist() == [6.0, -6.0]
    assert token_scale[0].item() == 1.0
    assert token_scale[1].item() == pytest.approx(1 / 2688, rel=1e-7)
    assert token_scale[2].item() == 0.0


def test_nan_does_not_hide_the_largest_and_alone_makes_the_scale_nan() -> None:
    rows = torch.cat([_row(math.nan, 6.0), torch.full((1, BLOCK), math.nan)])
    numbers, scales = quantize(rows, ONE, recipe=None)
    assert scales[0].item() == 1.0
    assert numbers[0, 0, :2].tolist() == [6.0, 6.0]
    assert math.isnan(scales[1].item())


def test_shapes_dtypes_and_recipes_are_checked() -> None:
    with pytest.raises(ShapeError, match="16 neighbours"):
        check_values(torch.ones(1, 17))
    with pytest.raises(ShapeError, match="float8"):
        check_values(torch.ones(1, 16).to(torch.float8_e4m3fn))
    with pytest.raises(ShapeError, match="uint8"):
        check_encoded(torch.zeros(1, 8), torch.zeros(1, 1).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="rms"):
        check_recipe(Recipe(error="rms"))
    with pytest.raises(ConfigError, match="1/1536"):
        check_recipe(Recipe(256), factor=1 / 2688)
    check_recipe(Recipe(256), factor=1 / 1536)
