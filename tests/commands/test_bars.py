# SPDX-License-Identifier: Apache-2.0
"""Bars count what was done."""

from __future__ import annotations

from tetrarch.commands.bars import Bars


def _shown(bars: Bars) -> list[tuple[float, float | None, str]]:
    return [(task.completed, task.total, task.fields["done"]) for task in bars._progress.tasks]


def test_a_bar_moves_and_goes_away() -> None:
    with Bars() as bars:
        bars.start("loading", 4096, "bytes")
        bars.advance(1024)
        assert _shown(bars) == [(1024, 4096, "1.0 KiB of 4.0 KiB")]
        bars.start("generating", 3, "outputs")
        bars.advance()
        assert _shown(bars) == [(1, 3, "1 of 3 outputs")]
        bars.finish()
        bars.advance()
        assert _shown(bars) == []
