# SPDX-License-Identifier: Apache-2.0
"""`tetrarch serve`: what the operator is told. That it serves is shown in tests/e2e."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tetrarch.commands import serve as command
from tetrarch.commands.words import read
from tetrarch.config.plan import Plan


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_no_log_level_hides_what_the_operator_waits_for(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(plan: Plan, *, announce: Any, progress: Any) -> None:
        assert plan.serve.log_level == level
        announce("Serving here")

    monkeypatch.setattr(command, "serve", serve)
    logger = logging.getLogger("tetrarch")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        assert command.run(read("serve", ["--log-level", level, "--device", "cpu"])) == 0
    finally:
        logger.handlers, logger.level, logger.propagate = before
    out, err = capsys.readouterr()
    assert out == ""
    assert "Serving here\n" in err
    assert ("quantization = " in err) == (level in ("debug", "info"))
