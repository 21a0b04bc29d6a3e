# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.distributed.lifeline import Lifeline, first_line
from tetrarch.distributed.meeting import Meeting


@pytest.fixture
def listener(meeting: Meeting) -> Iterator[socket.socket]:
    """Stands where the store would."""
    with socket.create_server((meeting.address, meeting.port)) as made:
        yield made


def test_a_store_that_opens_late_is_waited_for(meeting: Meeting) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((meeting.address, meeting.port))
        threading.Timer(0.3, listener.listen).start()
        began = time.monotonic()
        Lifeline().tie(meeting, began + 20)
        assert 0.2 < time.monotonic() - began < 10


def test_one_that_does_not_open_is_waited_for_until_the_deadline(meeting: Meeting) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="nothing can be reached"):
        Lifeline().tie(meeting, began + 0.3)
    assert 0.3 <= time.monotonic() - began < 10


def test_it_is_cut_when_the_store_hangs_up(listener: socket.socket, meeting: Meeting) -> None:
    line = Lifeline()
    line.tie(meeting, time.monotonic() + 10)
    store, _ = listener.accept()
    assert not line.is_cut
    store.close()
    deadline = time.monotonic() + 5
    while not line.is_cut:
        assert time.monotonic() < deadline
    line.close()


def test_it_is_cut_when_a_store_goes_that_has_taken_nobody_in(
    listener: socket.socket, meeting: Meeting
) -> None:
    """The system has, for it; and hangs up for it."""
    line = Lifeline()
    line.tie(meeting, time.monotonic() + 10)
    assert not line.is_cut
    listener.close()
    deadline = time.monotonic() + 5
    while not line.is_cut:
        assert time.monotonic() < deadline
    line.close()


def test_cutting_it_ends_the_wait_for_a_store(meeting: Meeting) -> None:
    line, began = Lifeline(), time.monotonic()
    threading.Timer(0.2, line.cut).start()
    line.tie(meeting, began + 60)
    assert line.is_cut
    assert time.monotonic() - began < 5
    line.cut()
    line.close()


def test_once_tied_it_is_what_others_wait_on(listener: socket.socket, meeting: Meeting) -> None:
    line = Lifeline()
    assert (line.fileno(), line.is_cut) == (-1, False)
    line.tie(meeting, time.monotonic() + 10)
    assert (line.fileno() > 0, line.is_cut) == (True, False)
    line.cut()
    assert line.is_cut
    line.close()
    line.cut()


def test_of_an_error_its_first_line_is_told_or_its_name() -> None:
    assert first_line(RuntimeError("one\ntwo")) == "one"
    assert first_line(RuntimeError("x" * 900)) == "x" * 200
    assert first_line(TimeoutError()) == "TimeoutError"
