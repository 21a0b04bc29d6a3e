# SPDX-License-Identifier: Apache-2.0
"""Work beside the steps: the thread computes, the engine's thread finishes."""

from __future__ import annotations

import threading

import pytest

from tetrarch.engine.jobs import Job, Then
from tetrarch.engine.messages import ControlReply

REPLY = ControlReply(ticket=1, ok=True)


def test_what_remains_is_done_by_whoever_finishes() -> None:
    threads: list[threading.Thread] = []
    may_go = threading.Event()

    def then() -> ControlReply:
        threads.append(threading.current_thread())
        return REPLY

    def work() -> Then:
        may_go.wait(60)
        threads.append(threading.current_thread())
        return then

    job = Job(1, "a test", work)
    assert (job.ticket, job.what, job.is_done) == (1, "a test", False)
    may_go.set()
    assert job.finish() is REPLY
    assert job.is_done
    worker, finisher = threads
    assert finisher is threading.current_thread() is not worker
    assert worker.daemon, "a peer that never answers would hold up the exit"


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), SystemExit(3)])
def test_whatever_the_thread_raises_comes_out_where_it_is_finished(error: BaseException) -> None:
    def work() -> Then:
        raise error

    with pytest.raises(type(error)) as caught:
        Job(1, "a test", work).finish()
    assert caught.value is error
