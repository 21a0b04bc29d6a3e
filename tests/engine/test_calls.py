# SPDX-License-Identifier: Apache-2.0
"""What calls ask for adds up; silence is noticed, and refusals are told once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine import calls as room
from tetrarch.engine.actions import UpdateFromDistributed, UpdateFromTensors
from tetrarch.engine.calls import ABANDON_S, REMIND_S, Calls, Refusals


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what lets seconds pass."""
    now = [1000.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])

    def add(seconds: float) -> None:
        now[0] += seconds

    return add


def tensors(**fields: Any) -> UpdateFromTensors:
    return UpdateFromTensors(ticket=1, data=b"", **fields)


def test_the_last_name_and_any_flush_count() -> None:
    calls = Calls(is_explicit=False)
    assert (calls.source, calls.version, calls.flush) == ("tensor", None, False)
    calls.note(tensors(weight_version="v", flush_cache=False))
    assert (calls.version, calls.flush) == ("v", False)
    calls.note(tensors(flush_cache=True))
    calls.note(UpdateFromDistributed(ticket=2, names=(), dtypes=(), shapes=(), flush_cache=False))
    assert (calls.source, calls.version, calls.flush) == ("distributed", "v", True)


def test_an_implicit_update_is_waited_for_from_its_last_call(wait: Callable[[float], None]) -> None:
    calls = Calls(is_explicit=False)
    wait(ABANDON_S - 1)
    assert calls.patience == 1.0
    calls.note(tensors())
    assert calls.patience == ABANDON_S
    wait(2 * ABANDON_S)
    assert calls.patience == 0.0


def test_of_an_explicit_update_somebody_is_reminded_again_and_again(
    wait: Callable[[float], None], bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.add("a", (20, 21))
    calls = Calls(is_explicit=True)
    wait(30.0)
    calls.note(tensors())
    for since in (60, 120):
        assert calls.patience == REMIND_S
        wait(REMIND_S)
        assert calls.patience == 0.0
        calls.remind(bench.engine.heartbeat())
        words = f"open for {since + 30} s, and {since} s have passed without a call"
        assert words in caplog.messages[-1]
        assert "1 requests wait" in caplog.messages[-1]


def test_refusals_are_told_once_and_only_if_there_were_any(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals()
    with refusals.counted():
        pass
    assert refusals.told() == []
    for kind in (RequestError, ValueError):
        error = RequestError("a", why="b", fix="c") if kind is RequestError else ValueError()
        with pytest.raises(kind), refusals.counted():
            raise error
    assert caplog.messages == []
    [words] = refusals.told()
    assert words.startswith("1 call was refused before this update was done")
    assert caplog.messages == [words]
    assert refusals.told() == []
