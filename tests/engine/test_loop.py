# SPDX-License-Identifier: Apache-2.0
"""The loop of the engine process, with a list for a socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.loop import EngineLoop
from tetrarch.engine.messages import (
    Abort,
    ControlReply,
    Flush,
    Heartbeat,
    Outbound,
    Shutdown,
    Snapshot,
    encode,
)
from tetrarch.engine.request import Delta, GenerateRequest, SamplingParams

Make = Callable[..., Any]
Script = list[Any]  # messages, bytes, or a number of seconds that pass first


class Post:
    """Deliver one entry of a script before each step, then `Shutdown`."""

    def __init__(self, script: Script) -> None:
        self.script = [*script, Shutdown()]
        self.sent: list[Outbound] = []
        self.waits: list[float | None] = []

    def take(self, timeout: float | None) -> list[bytes]:
        self.waits.append(timeout)
        entry = self.script.pop(0)
        if isinstance(entry, float):
            time.sleep(entry)
            return []
        entries = entry if isinstance(entry, list) else [entry]
        return [one if isinstance(one, bytes) else encode(one) for one in entries]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def request(rid: str, tokens: int = 3, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    fields = {"prompt_ids": (5, 6, 7), "sampling": sampling, **fields}
    return GenerateRequest(rid=rid, **fields)


@pytest.fixture
def play(make_bench: Make) -> Callable[[Script], Post]:
    def run(script: Script) -> Post:
        post = Post(script)
        EngineLoop(make_bench().engine, post, post.sent.extend).run()
        return post

    return run


def test_a_request_is_answered_and_idle_time_costs_nothing(
    play: Callable[[Script], Post],
) -> None:
    post = play([request("a"), [], [], []])
    assert [delta.rid for delta in post.of(Delta)] == ["a"] * 3
    assert post.of(Delta)[-1].finish.kind == "length"
    assert post.waits == [None, 0.0, 0.0, None, None]


def test_garbage_is_ignored(play: Callable[[Script], Post]) -> None:
    post = play([b"", b"\xff\x00garbage", encode([]), b"\x81\xa4type\xa5Nobod", request("a", 1)])
    assert [delta.rid for delta in post.of(Delta)] == ["a"]


def test_a_request_that_cannot_be_served_ends_with_400(play: Callable[[Script], Post]) -> None:
    post = play([[request("bad", prompt_ids=()), request("good", 1)]])
    bad, good = post.of(Delta)
    assert (bad.rid, bad.finish.kind, bad.finish.status) == ("bad", "abort", 400)
    assert bad.finish.param == "input_ids"
    assert good.finish.kind == "length"


def test_aborts_answer_their_ticket_and_keep_quiet_when_asked(
    play: Callable[[Script], Post],
) -> None:
    script = [
        [request("a", 50), request("b", 50), request("c", 50)],
        Abort(rid="a", ticket=4),
        Abort(rid="b", quiet=True),
        Abort(rid="nobody", ticket=5),
    ]
    post = play(script)
    assert {d.rid: d.finish.kind for d in post.of(Delta) if d.finish} == {
        "a": "abort",
        "c": "abort",
    }
    replies = {reply.ticket: reply.payload for reply in post.of(ControlReply)}
    assert replies == {4: {"aborted": 1}, 5: {"aborted": 0}}


def test_a_flush_succeeds_when_idle_and_fails_when_busy(play: Callable[[Script], Post]) -> None:
    post = play([Flush(ticket=1), request("a", 3), Flush(ticket=2), [], [], Flush(ticket=3)])
    assert [(reply.ticket, reply.ok) for reply in post.of(ControlReply)] == [
        (1, True),
        (2, False),
        (3, True),
    ]


def test_a_flush_is_answered_behind_a_heartbeat_with_the_counts_that_begin_anew(
    make_bench: Make,
) -> None:
    post = Post([request("a", 9), *[[]] * 4, Flush(ticket=1)])
    seen: list[str] = []

    def tell(news: list[Outbound]) -> None:
        for one in news:  # the counts go on changing
            if isinstance(one, Heartbeat):
                assert one.spec is not None
                seen.append(f"{one.spec.lifetime.num_verifies} {one.spec.since_flush.num_verifies}")
            elif isinstance(one, ControlReply):
                seen.append("reply")

    EngineLoop(make_bench(steps=3).engine, post, tell).run()
    assert seen[-2:] == ["2 0", "reply"]  # of nine tokens the prompt yields one


def test_a_flush_waits_until_idle_and_a_second_one_fails(play: Callable[[Script], Post]) -> None:
    post = play([request("a", 6), Flush(ticket=1, timeout=30.0), Flush(ticket=2), *[[]] * 6])
    assert [(reply.ticket, reply.ok) for reply in post.of(ControlReply)] == [(2, False), (1, True)]
    assert post.of(ControlReply)[0].message.startswith("another flush is waiting")


def test_a_flush_gives_up_at_its_deadline(play: Callable[[Script], Post]) -> None:
    post = play([request("a", 90), Flush(ticket=1, timeout=0.02), 0.03, []])
    (reply,) = post.of(ControlReply)
    assert not reply.ok
    assert reply.message == "requests are running or waiting; ?timeout=60 waits for them"


def test_a_snapshot_holds_the_counters(play: Callable[[Script], Post]) -> None:
    post = play([request("a"), [], [], Snapshot(ticket=9)])
    (reply,) = post.of(ControlReply)
    assert reply.payload["counters"]["generation_tokens_total"] == 3


def test_the_load_is_told_when_it_changes(play: Callable[[Script], Post]) -> None:
    post = play([request("a", 4), [], [], [], []])
    assert [beat.num_running for beat in post.of(Heartbeat)] == [1, 0]


def test_shutdown_ends_what_runs(play: Callable[[Script], Post]) -> None:
    post = play([request("a", 50)])
    assert post.of(Delta)[-1].finish.kind == "abort"


def test_a_defect_is_not_survived(make_bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench()
    monkeypatch.setattr(bench.executor, "launch", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        EngineLoop(bench.engine, Post([request("a")]), print).run()
