# SPDX-License-Identifier: Apache-2.0
"""Telling a server to stop in its worst moments: clients get an answer, and nothing stays."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil

if TYPE_CHECKING:
    from conftest import RunningServer

LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}


def begin(server: RunningServer, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Start a request, a completion and a stream."""
    completion = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True}
    futures = [
        pool.submit(server.http.post, "/generate", json=LONG),
        pool.submit(server.http.post, "/v1/completions", json=completion),
        pool.submit(server.events, **LONG),
    ]
    server.wait_for(lambda load: load["num_running_reqs"] == 3, seconds=5)
    return futures


def freeze(engine: psutil.Process) -> None:
    """Stop a process, and wait until it stands still."""
    engine.suspend()
    while engine.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def assert_refused(futures: list[Future[Any]]) -> None:
    """Whoever waits is told why, in the shape that its endpoint promises."""
    native, openai, events = (future.result(5) for future in futures)
    assert (native.status_code, openai.status_code) == (503, 503)
    assert native.headers["retry-after"]
    for error in (native.json()["error"], openai.json(), events[-1]["error"]):
        assert error["code"] == 503
        assert "the engine is stopping" in error["message"]


def test_a_stop_under_a_frozen_engine_answers_everybody_and_leaves_no_process(
    hasty_server: RunningServer,
) -> None:
    engine = hasty_server.engine
    with ThreadPoolExecutor() as pool:
        futures = begin(hasty_server, pool)
        freeze(engine)
        hasty_server.process.send_signal(signal.SIGTERM)
        assert_refused(futures)
    assert hasty_server.process.wait(20) == 0
    assert not engine.is_running()
    assert "Traceback" not in hasty_server.log.read_text()


def test_signals_while_an_idle_frozen_engine_is_ended_hasten_and_leave_no_orphan(
    hasty_server: RunningServer,
) -> None:
    engine = hasty_server.engine
    freeze(engine)
    hasty_server.process.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # requests there are none: by now the engine is being ended
    assert engine.is_running()
    hasty_server.process.send_signal(signal.SIGTERM)
    hasty_server.process.send_signal(signal.SIGINT)
    engine.wait(2)  # an engine has 5 s to go, of which 4 are left
    assert hasty_server.process.wait(20) == 0


def test_a_stop_says_what_it_waits_for_and_a_second_one_does_not_wait(
    own_server: RunningServer,
) -> None:
    with ThreadPoolExecutor() as pool:
        futures = begin(own_server, pool)
        own_server.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 2
        while "Stopping" not in own_server.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        [line] = [line for line in own_server.log.read_text().splitlines() if "Stopping" in line]
        assert "up to 10 s" in line
        assert "(3)" in line
        assert "Ctrl-C again" in line
        began = time.monotonic()
        own_server.process.send_signal(signal.SIGINT)
        assert_refused(futures)
    assert own_server.process.wait(20) == 0
    assert time.monotonic() - began < 8  # of the ten seconds that requests have
    assert "Traceback" not in own_server.log.read_text()


def test_a_running_request_keeps_its_text_when_its_time_is_up(hasty_server: RunningServer) -> None:
    """The negative control: a healthy engine aborts, so its clients get 200 and what there is."""
    with ThreadPoolExecutor() as pool:
        native, _, events = begin(hasty_server, pool)
        hasty_server.process.send_signal(signal.SIGTERM)
        reply: httpx.Response = native.result(5)
        assert reply.status_code == 200
        assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert reply.json()["text"]
        assert events.result(5)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert hasty_server.process.wait(20) == 0
