# SPDX-License-Identifier: Apache-2.0
"""The page says what the table says."""

from __future__ import annotations

from tetrarch.config.support import REFUSED, SUPPORT
from tetrarch.config.support_page import markdown


def test_the_page_has_a_line_for_every_row_and_refusal() -> None:
    lines = [line for line in markdown().splitlines() if line.startswith("| ")]
    assert len(lines) == len(SUPPORT) + len(REFUSED) + 4  # two heads, two rules
    assert any(line.startswith("| per_token x deepep |") for line in lines)


def test_the_page_tells_what_ran_from_what_was_only_compiled() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| per_token | ")]
    triton, reference = ([cell.strip() for cell in row.split("|")] for row in rows)
    assert "sm90; compiled only: sm80, sm89, sm100, sm103, sm120" in triton
    assert "everywhere" in reference
