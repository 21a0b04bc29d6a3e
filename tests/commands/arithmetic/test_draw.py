# SPDX-License-Identifier: Apache-2.0
"""Numbers stay in range and calculations are written out truthfully."""

from __future__ import annotations

import random

import pytest

from tetrarch.commands.arithmetic.draw import Draw, added, divided, multiplied, plural, subtracted


@pytest.mark.parametrize(("level", "top"), [(0, 12), (1, 40), (2, 80)])
def test_numbers_grow_with_the_level(level: int, top: int) -> None:
    draw = Draw(random.Random(1), level)
    drawn = {draw.number(3, 40) for _ in range(2000)}
    assert (min(drawn), max(drawn)) == (3, top)


def test_calculations_are_written_as_a_teacher_would() -> None:
    assert added(1, 2) == "1 + 2 = 3"
    assert added(1, 2, 3) == "1 + 2 + 3 = 3 + 3 = 6"
    assert subtracted(9, 4) == "9 - 4 = 5"
    assert divided(12, 4) == "12 / 4 = 3"
    assert multiplied(4, 12) == "4 * 12 = 48"
    assert multiplied(13, 12) == "13 * 12 = 13 * 10 + 13 * 2 = 130 + 26 = 156"
    assert multiplied(20, 12) == "20 * 12 = 240"


def test_plurals_end_as_the_training_text_ended_them() -> None:
    assert [plural(good) for good in ("hat", "glass", "box")] == ["hats", "glasses", "boxes"]
