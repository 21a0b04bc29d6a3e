# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic against Python's own."""

from __future__ import annotations

import math

import pytest

from tetrarch.core.units import align_up, ceil_div, format_bytes


@pytest.mark.parametrize("value", [0, 1, 15, 16, 17, 1 << 40])
def test_rounding_up_equals_the_exact_ceiling(value: int) -> None:
    assert ceil_div(value, 16) == math.ceil(value / 16)
    assert align_up(value, 16) == math.ceil(value / 16) * 16


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 41, "2.0 TiB")],
)
def test_sizes_are_written_with_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text
