# SPDX-License-Identifier: Apache-2.0
"""A launch reports all its errors, and why each choice was made."""

from __future__ import annotations

import pytest

from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.plan import Decision
from tetrarch.core.errors import ConfigError, LaunchErrors


def error(what: str) -> ConfigError:
    return ConfigError(what, why="because", fix="do not")


def fail(problem: Exception) -> int:
    raise problem


def test_a_choice_says_whether_it_was_asked_for() -> None:
    ledger = Ledger()
    assert ledger.pick("page_size", 32, 16, "by default") == 32
    assert ledger.pick("threads", None, 2, "two cores") == 2
    assert ledger.decisions == [
        Decision("page_size", "32", ASKED),
        Decision("threads", "2", "two cores"),
    ]


def test_zero_is_something_that_was_asked_for() -> None:
    assert Ledger().pick("graph_max_batch", 0, 64, "by default") == 0


def test_steps_go_on_after_an_error() -> None:
    ledger = Ledger([error("earlier")])
    assert ledger.attempt(lambda: 5) == 5
    assert ledger.attempt(lambda: fail(error("one"))) is None
    ledger.refuse(LaunchErrors([error("two"), error("three")]))
    assert [e.what for e in ledger.errors] == ["earlier", "one", "two", "three"]


def test_a_defect_is_not_taken_for_a_refusal() -> None:
    with pytest.raises(ZeroDivisionError):
        Ledger().attempt(lambda: fail(ZeroDivisionError()))
