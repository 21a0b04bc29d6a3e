# SPDX-License-Identifier: Apache-2.0
"""Work beside the steps: the thread computes, the engine's thread finishes."""

from __future__ import annotations

import threading
import time

import pytest

from tetrarch.core.courtesy import Courtesy, gently
from tetrarch.core.errors import RequestError
from tetrarch.engine.jobs import Job, OneJob, Then
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

    job = Job(1, "a test", work, courtesy=Courtesy())
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
        Job(1, "a test", work, courtesy=Courtesy()).finish()
    assert caught.value is error


def test_work_is_a_guest_beside_the_steps() -> None:
    items, seen = [1, 2], list[object]()

    def work() -> Then:
        seen.append(gently(items))
        return lambda: REPLY

    Job(1, "a test", work, courtesy=Courtesy()).finish()
    assert seen[0] is not items, "it would not stand still"
    assert gently(items) is items


def test_one_job_at_a_time() -> None:
    jobs, may_go = OneJob(), threading.Event()

    def work() -> Then:
        may_go.wait(60)
        return lambda: REPLY

    for holds_up in (False, True):
        assert (jobs.is_busy, jobs.holds_up, jobs.take()) == (False, False, None)
        jobs.require_none()
        may_go.clear()
        jobs.start(7, "a test is under way", work, holds_up=holds_up)
        assert (jobs.is_busy, jobs.holds_up, jobs.take()) == (True, holds_up, None)
        with pytest.raises(RequestError, match="a test is under way"):
            jobs.start(8, "another", work)
        may_go.set()
        while (job := jobs.take()) is None:
            time.sleep(0.001)
        assert (job.ticket, job.finish()) == (7, REPLY)
