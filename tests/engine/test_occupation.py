# SPDX-License-Identifier: Apache-2.0
"""Memory is released when no request is in the way, and resumed in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.actions import (
    Continue,
    Pause,
    Release,
    Resume,
)
from tetrarch.memory.slots import Region

Make = Callable[..., Any]
PROMPT = tuple(range(20, 33))


def test_memory_comes_and_goes_as_often_as_a_client_likes(desk: Any) -> None:
    reply = desk.ask(Release)
    everything = [tag.value for tag in Region]
    assert reply.payload == {
        "released": everything,
        "already": [],
        "num_bytes": dict.fromkeys(everything, 100),
        "state": dict.fromkeys(everything, "released"),
    }
    assert desk.beat.state == "weights_released"
    assert desk.ask(Release, tags=("weights",)).payload["already"] == ["weights"]
    reply = desk.ask(Resume, tags=("weights",))
    assert reply.payload["resumed"] == ["weights"]
    assert reply.payload["state"] == {
        "weights": "resident",
        "kv_cache": "released",
        "cuda_graph": "released",
    }
    assert desk.beat.state == "weights_not_loaded"
    assert desk.ask(Resume, tags=("weights",)).payload["already"] == ["weights"]


@pytest.mark.parametrize("order", list(itertools.permutations(["weights", "kv_cache", "all", "x"])))
def test_any_order_of_releases_and_resumes_is_answered(desk: Any, order: tuple[str, ...]) -> None:
    for kind in (Resume, Release, Release, Resume, Resume):
        for tag in order:
            reply = desk.ask(kind, tags=() if tag == "all" else (tag,))
            assert (reply.ok, reply.status) == ((False, 400) if tag == "x" else (True, 200))


def test_memory_in_use_is_not_released(desk: Any, bench: Any) -> None:
    desk.send(desk.request("a"))
    reply = desk.ask(Release)
    assert (reply.ok, reply.status, reply.code) == (False, 400, "busy")
    desk.run()
    assert desk.tokens("a") == bench.expected(desk.request("a"))
    assert desk.ask(Release).ok


def test_a_release_may_wait_until_requests_have_ended(desk: Any) -> None:
    desk.send(desk.request("a"))
    ticket = desk.post(Release, wait_s=60.0)
    assert desk.reply(ticket) is None
    desk.run()
    assert desk.finish("a").kind == "length"
    reply = desk.reply(ticket)
    assert reply is not None
    assert reply.ok


def test_a_release_waits_no_longer_than_it_was_told(desk: Any) -> None:
    desk.send(desk.request("a"))
    desk.ask(Pause, mode="in_place")
    reply = desk.ask(Release, wait_s=0.02)
    assert (reply.status, reply.code) == (400, "busy")


def test_waiting_requests_of_a_paused_engine_are_not_in_the_way(desk: Any, bench: Any) -> None:
    desk.send(desk.request("a"))
    desk.turn(3)
    desk.ask(Pause, mode="retract")
    assert desk.ask(Release, tags=("kv_cache",)).ok
    assert desk.engine.heartbeat().num_cached_tokens == 0, "it would match pages that are gone"
    desk.ask(Continue)
    assert desk.finish("a") is None
    desk.ask(Resume, tags=("kv_cache",))
    desk.run()
    assert desk.tokens("a") == bench.expected(desk.request("a"))
