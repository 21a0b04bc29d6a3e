# SPDX-License-Identifier: Apache-2.0
"""A loop goes on beside a guest of pure Python, and the guest beside the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tetrarch.core import courtesy as room
from tetrarch.core.courtesy import Courtesy, gently


def test_who_is_no_guest_gets_the_very_same_items() -> None:
    items = [1, 2, 3]
    assert gently(items) is items


def test_a_guest_gets_all_items_and_is_a_guest_only_so_long() -> None:
    courtesy, items = Courtesy(), list(range(100))
    with courtesy.guest():
        assert gently(items) is not items
        assert list(gently(items)) == items
        with Courtesy().guest():
            assert list(gently(iter(items))) == items
        assert gently(items) is not items
    assert gently(items) is items


def grows(done: list[int], before: int) -> bool:
    """Wait until a guest has got on."""
    deadline = time.monotonic() + 60
    while done[0] <= before and time.monotonic() < deadline:
        time.sleep(0.001)
    return done[0] > before


def wait_until_still(done: list[int]) -> int:
    """Wait until a guest's share is spent; return its count."""
    before = -1
    while done[0] != before:
        before = done[0]
        time.sleep(0.05)
    return before


@pytest.fixture
def start() -> Iterator[Callable[[Courtesy], list[int]]]:
    """Return what starts a guest that counts until the test ends."""
    threads: list[threading.Thread] = []
    over = threading.Event()

    def begin(courtesy: Courtesy) -> list[int]:
        done = [0]

        def work() -> None:
            with courtesy.guest():
                for _ in gently(iter(over.is_set, True)):
                    done[0] += 1

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return done

    yield begin
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_guest_stands_still_in_a_turn_and_works_between_two(
    start: Callable[[Courtesy], list[int]],
) -> None:
    courtesy = Courtesy()
    done = start(courtesy)
    with courtesy.turn():
        before = wait_until_still(done)
    assert grows(done, before)


def test_a_turn_follows_another_at_once_and_the_guest_still_moves(
    start: Callable[[Courtesy], list[int]],
) -> None:
    courtesy = Courtesy()
    done = start(courtesy)
    for _ in range(3):
        with courtesy.turn():
            before = wait_until_still(done)
        with courtesy.turn():  # nothing waits in between, as a loop with work does not
            assert grows(done, before)


def test_a_share_is_as_long_as_a_turn_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    courtesy, clock = Courtesy(), iter([1.0, 1.5, 2.0, 2.0])
    monkeypatch.setattr(room.time, "thread_time", lambda: next(clock))
    for share in (0.5, 0.004):
        with courtesy.turn():
            pass
        assert vars(courtesy)["_share_s"] == share


def test_a_turn_that_fails_lets_guests_go_on(start: Callable[[Courtesy], list[int]]) -> None:
    courtesy = Courtesy()
    done = start(courtesy)
    with pytest.raises(ZeroDivisionError), courtesy.turn():
        _ = 1 / 0
    assert grows(done, done[0])
