# SPDX-License-Identifier: Apache-2.0
"""Log lines name who wrote them, and configuring twice does not double them."""

from __future__ import annotations

import pytest

from tetrarch.core.log import configure_logging, get_logger


def test_lines_carry_the_writer_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(who="rank 3")
    configure_logging(level="warning", who="rank 3")
    get_logger("tetrarch.engine").warning("pages are short")
    get_logger("tetrarch.engine").info("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("W rank 3 pages are short")
