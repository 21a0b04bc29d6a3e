# SPDX-License-Identifier: Apache-2.0
"""What clients do to all, over a fake executor: pauses, versions, memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.actions import (
    BeginUpdate,
    CheckWeights,
    Continue,
    DestroyGroup,
    EndUpdate,
    GetWeights,
    Pause,
    PostProcess,
    Release,
    SetVersion,
    UpdateFromDisk,
    UpdateFromTensors,
)
from tetrarch.engine.messages import ControlReply, Flush, Heartbeat, encode
from tetrarch.engine.request import Delta
from tetrarch.executor.updates import WeightsState
from tetrarch.memory.slots import Region

Make = Callable[..., Any]
PROMPT = tuple(range(20, 33))


def test_a_pause_that_aborts_ends_everything_before_it_is_answered(desk: Any, bench: Any) -> None:
    desk.send(desk.request("a"), desk.request("b"))
    desk.turn(2)
    steps = len(bench.executor.steps)
    reply = desk.ask(Pause)
    assert (reply.ok, reply.payload) == (True, {"num_paused_requests": 0})
    assert desk.finish("a").kind == desk.finish("b").kind == "abort"
    assert len(bench.executor.steps) == steps, "it steps while it is paused"
    before = desk.said.index(reply)
    assert all(desk.said.index(desk.deltas(rid)[-1]) < before for rid in "ab")
    assert desk.beat.is_paused


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_where_they_were(desk: Any, bench: Any, mode: str) -> None:
    desk.send(desk.request("a"))
    desk.turn(4)
    told, steps = desk.tokens("a"), len(bench.executor.steps)
    assert 0 < len(told) < 12
    for _ in range(2):  # idempotent
        reply = desk.ask(Pause, mode=mode)
        assert (reply.ok, reply.payload["num_paused_requests"]) == (True, 1)
    desk.send(desk.request("b"))
    assert (desk.tokens("a"), len(bench.executor.steps)) == (told, steps)
    assert desk.engine.heartbeat().num_paused == 2
    assert desk.beat.num_running == (0 if mode == "retract" else 1)
    for _ in range(2):
        assert desk.ask(Continue).ok
    desk.run()
    assert desk.tokens("a") == desk.tokens("b") == bench.expected(desk.request("a"))
    assert desk.deltas("a")[-1].num_retractions == (1 if mode == "retract" else 0)
    bench.check_pages()


def test_continue_without_a_pause_changes_nothing(desk: Any, bench: Any) -> None:
    desk.send(desk.request("a"))
    assert desk.ask(Continue).ok
    desk.run()
    assert desk.tokens("a") == bench.expected(desk.request("a"))


def test_a_later_pause_may_be_stricter(desk: Any) -> None:
    desk.send(desk.request("a"))
    desk.turn(3)
    desk.ask(Pause, mode="in_place")
    desk.ask(Pause, mode="retract")
    assert desk.engine.num_running == 0
    desk.ask(Pause, mode="abort")
    assert desk.finish("a").kind == "abort"
    assert desk.finish("a").message == "aborted by /pause_generation"


def test_a_flush_fails_while_requests_are_parked_and_works_while_they_wait(desk: Any) -> None:
    desk.send(desk.request("a"))
    desk.turn(3)
    desk.ask(Pause, mode="in_place")
    reply = desk.ask(Flush)
    assert (reply.ok, reply.status, reply.code) == (False, 400, "busy")
    assert "retract" in reply.message
    assert "timeout=" not in reply.message, "waiting cannot help"
    desk.ask(Pause, mode="retract")
    assert desk.beat.num_waiting == 1
    assert desk.engine.heartbeat().num_cached_tokens > 0
    assert desk.ask(Flush).ok
    assert desk.engine.heartbeat().num_cached_tokens == 0


def test_an_idle_paused_engine_waits_for_messages_and_does_not_spin(desk: Any) -> None:
    desk.send(desk.request("a"))
    desk.ask(Pause, mode="retract")
    with pytest.raises(AssertionError, match="would wait for ever"):
        desk.turn()


def test_a_version_is_told_before_the_answer(desk: Any) -> None:
    desk.send(desk.request("a"))
    desk.turn(3)
    reply = desk.ask(SetVersion, version="7", abort_all_requests=False)
    assert reply.payload == {"new_version": "7"}
    beats = [m for m in desk.said[: desk.said.index(reply)] if isinstance(m, Heartbeat)]
    assert beats[-1].weight_version == "7"
    count = sum(
        len(m.token_ids) for m in desk.said[: desk.said.index(reply)] if isinstance(m, Delta)
    )
    desk.run()
    spans = desk.deltas("a")[-1].versions
    assert [(span.version, span.start, span.end) for span in spans] == [
        ("default", 0, count),
        ("7", count, 12),
    ]


def test_a_new_version_aborts_unless_told_otherwise(desk: Any) -> None:
    desk.send(desk.request("a"))
    assert desk.ask(SetVersion, version="8").ok
    assert desk.finish("a").kind == "abort"


STATES = {
    "weights_inconsistent": lambda e: setattr(e.weights, "state", WeightsState.INCONSISTENT),
    "weights_released": lambda e: e.release([Region.WEIGHTS]),
    "weights_not_loaded": lambda e: (e.release(list(Region)), e.resume(list(Region))),
    "kv_released": lambda e: e.release([Region.KV_CACHE]),
}


@pytest.mark.parametrize("code", STATES)
def test_generation_is_refused_by_name_while_it_is_impossible(
    desk: Any, bench: Any, code: str
) -> None:
    """Who waits since before goes on waiting; nobody steps."""
    desk.send(desk.request("a"))
    desk.turn(2)
    STATES[code](bench.executor)
    steps = len(bench.executor.steps)
    desk.send(desk.request("b"))
    finish = desk.finish("b")
    assert (finish.kind, finish.status, finish.code) == ("abort", 503, code)
    assert desk.finish("a") is None
    assert len(bench.executor.steps) == steps
    bench.executor.released.clear()
    bench.executor.weights.state = WeightsState.READY
    desk.run()
    assert desk.tokens("a") == bench.expected(desk.request("a"))


def test_released_graphs_alone_stop_nobody(desk: Any, bench: Any) -> None:
    desk.ask(Release, tags=("cuda_graph",))
    desk.send(desk.request("a"))
    desk.run()
    assert desk.tokens("a") == bench.expected(desk.request("a"))


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), -1.0])
def test_a_wait_that_is_no_time_is_none(desk: Any, wait: float) -> None:
    desk.send(desk.request("a"))
    desk.ask(Pause, mode="in_place")
    assert desk.ask(Release, wait_s=wait).code == "busy"
    assert desk.ask(Flush, timeout=wait).code == "busy"


def test_a_defect_is_answered_with_500_and_the_engine_goes_on(
    desk: Any, bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """`FakeWeights` lacks most of what a store has: every call of it is a defect."""
    for kind, fields in [
        (GetWeights, {"name": "x"}),
        (CheckWeights, {"action": "checksum"}),
        (UpdateFromDisk, {"path": "x"}),
        (BeginUpdate, {}),
        (PostProcess, {"begins": True}),
    ]:
        reply = desk.ask(kind, **fields)
        assert (reply.ok, reply.status, reply.code) == (False, 500, "internal_error")
        assert "Traceback" in caplog.text
    desk.send(desk.request("a"))
    desk.run()
    assert desk.tokens("a") == bench.expected(desk.request("a"))


def test_what_is_out_of_place_is_refused(desk: Any) -> None:
    for kind, fields in [
        (EndUpdate, {}),
        (DestroyGroup, {"group_name": "nobody"}),
        (UpdateFromTensors, {"data": b"garbage"}),
        (UpdateFromTensors, {"data": b"", "load_format": "my.own.loader"}),
    ]:
        reply = desk.ask(kind, **fields)
        assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_request")
    assert desk.ask(PostProcess).ok
    assert desk.ask(PostProcess, ends=True).ok


def test_an_answer_that_msgpack_cannot_carry_is_spelt_out(desk: Any, bench: Any) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a file called \udcff")

    bench.executor.weights.begin = fail
    reply = desk.ask(BeginUpdate)
    assert reply.message == "ValueError: a file called \\udcff"
    assert encode([ControlReply(ticket=1, ok=False, message=reply.message)])
