# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tetrarch.core.errors import RequestError
from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.rendezvous import await_store, connect, first_line, from_trainer, left


def test_a_store_that_opens_late_is_waited_for(meeting: Meeting) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((meeting.address, meeting.port))
        threading.Timer(0.3, listener.listen).start()
        began = time.monotonic()
        await_store(meeting, began + 20)
        assert 0.2 < time.monotonic() - began < 10


def test_one_that_does_not_open_is_waited_for_until_the_deadline(meeting: Meeting) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="nothing can be reached"):
        await_store(meeting, began + 0.3)
    assert 0.3 <= time.monotonic() - began < 10


def test_ranks_that_do_not_come_are_waited_for_until_the_deadline(meeting: Meeting) -> None:
    limit = timedelta(seconds=20)
    store = dist.TCPStore(
        "127.0.0.1", meeting.port, 2, is_master=True, wait_for_workers=False, timeout=limit
    )
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        connect(meeting, began + 0.5)
    assert 0.4 < time.monotonic() - began < 10
    del store


def test_a_time_that_has_passed_is_a_millisecond_for_torch_takes_no_less() -> None:
    assert left(time.monotonic() - 5) == timedelta(milliseconds=1)
    assert 9 < left(time.monotonic() + 10).total_seconds() <= 10
    options = from_trainer(time.monotonic() + 10)
    assert (options.rootRank, options.rootTensor) == (0, 0)
    assert 9 < options.timeout.total_seconds() <= 10


def test_of_an_error_its_first_line_is_told_or_its_name() -> None:
    assert first_line(RuntimeError("one\ntwo")) == "one"
    assert first_line(RuntimeError("x" * 900)) == "x" * 200
    assert first_line(TimeoutError()) == "TimeoutError"
