# SPDX-License-Identifier: Apache-2.0
"""Loading has a line at each end, and what stops it is not called ready."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tetrarch.commands import loading
from tetrarch.config.plan import Plan
from tetrarch.core.errors import CheckpointError
from tetrarch.core.progress import NoProgress

PLAN: Any = SimpleNamespace(
    model=SimpleNamespace(served_name="some/model"),
    quant=SimpleNamespace(contract=SimpleNamespace(name="none/bf16")),
)


def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(logging.getLogger("tetrarch"), "propagate", True)
    with caplog.at_level("INFO", logger="tetrarch"), contextlib.suppress(CheckpointError):
        loading.load(cast("Plan", PLAN), NoProgress())
    return [record.getMessage() for record in caplog.records]


def test_there_is_a_line_before_and_one_after(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((10.0, 59.0))
    monkeypatch.setattr(loading.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(loading, "LLM", lambda **_: None)
    assert lines(caplog, monkeypatch) == ["loading some/model as none/bf16", "ready after 49.0 s"]


def test_what_stops_the_start_is_not_ready(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(**_: object) -> None:
        raise CheckpointError("no weights", why="the folder is empty", fix="name another one")

    monkeypatch.setattr(loading, "LLM", stop)
    assert lines(caplog, monkeypatch) == ["loading some/model as none/bf16"]
