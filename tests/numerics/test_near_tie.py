# SPDX-License-Identifier: Apache-2.0
"""A divergence is accepted where the reference was almost undecided, and counted."""

from __future__ import annotations

import pytest

from tetrarch.numerics.near_tie import Agreement, compare_greedy
from tolerance import NEAR_TIE

SURE, UNDECIDED = 2 * NEAR_TIE, NEAR_TIE / 2
OUTPUT = [5, 6, 7]


@pytest.mark.parametrize(
    ("other", "gaps", "want"),
    [
        (OUTPUT, [UNDECIDED] * 3, Agreement(1, 0, ())),
        ([5, 9, 9], [SURE, UNDECIDED, SURE], Agreement(0, 1, ())),
        ([5, 9, 9], [UNDECIDED, SURE, UNDECIDED], Agreement(0, 0, ((0, 1),))),
        ([5, 9, 9], [SURE, NEAR_TIE, SURE], Agreement(0, 0, ((0, 1),))),
        ([5, 6], [UNDECIDED] * 3, Agreement(0, 0, ((0, 2),))),
        ([5, 6, 7, 8], [UNDECIDED] * 3, Agreement(0, 0, ((0, 3),))),
    ],
    ids=["same", "near a tie", "where it was sure", "at the bound", "cut off", "longer"],
)
def test_only_the_gap_where_they_part_counts(
    other: list[int], gaps: list[float], want: Agreement
) -> None:
    assert compare_greedy([OUTPUT], [other], [gaps]) == want


def test_every_output_is_counted_once() -> None:
    others = [OUTPUT, [9, 9, 9], [5, 6, 9]]
    gaps = [[SURE] * 3, [UNDECIDED, SURE, SURE], [UNDECIDED, UNDECIDED, SURE]]
    found = compare_greedy([OUTPUT] * 3, others, gaps)
    assert found == Agreement(num_same=1, num_near_ties=1, defects=((2, 2),))


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens and 1 gaps"):
        compare_greedy([OUTPUT], [OUTPUT], [[SURE]])
    with pytest.raises(ValueError, match="shorter"):
        compare_greedy([OUTPUT], [], [])
