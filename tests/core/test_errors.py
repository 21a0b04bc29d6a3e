# SPDX-License-Identifier: Apache-2.0
"""Errors say what, why and fix, and survive the trip between processes."""

from __future__ import annotations

import pickle

from tetrarch.core.errors import LaunchErrors, RequestError, TetrarchError, Unsupported


def test_an_error_prints_what_why_and_fix_on_three_lines() -> None:
    error = Unsupported("no row", why="the table has none", fix="--moe-runner reference")
    lines = str(error).splitlines()
    assert lines == ["no row", "  why  the table has none", "  fix  --moe-runner reference"]


def test_errors_keep_type_and_fields_through_pickle() -> None:
    error = pickle.loads(pickle.dumps(Unsupported("a", why="b", fix="c")))
    assert type(error) is Unsupported
    assert (error.what, error.why, error.fix) == ("a", "b", "c")
    request = pickle.loads(pickle.dumps(RequestError("a", why="b", fix="c", param="top_p")))
    assert (type(request), request.param, request.why) == (RequestError, "top_p", "b")


def test_launch_errors_report_every_problem_at_once() -> None:
    both = LaunchErrors(
        [TetrarchError("one", why="w1", fix="f1"), Unsupported("two", why="w2", fix="f2")]
    )
    assert both.what.startswith("2 problems")
    assert "one" in str(both)
    assert "two" in str(both)
    again = pickle.loads(pickle.dumps(both))
    assert [error.what for error in again.errors] == ["one", "two"]
    assert LaunchErrors([TetrarchError("one", why="", fix="")]).what.startswith("1 problem with")
