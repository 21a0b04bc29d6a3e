# SPDX-License-Identifier: Apache-2.0
"""Weights that change while requests live, over a real model: who notices, and when."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tetrarch.engine import calls, updates
from tetrarch.engine.actions import (
    BeginUpdate,
    CheckWeights,
    Continue,
    EndUpdate,
    Pause,
    PostProcess,
    Release,
    Resume,
    SetVersion,
    UpdateFromDisk,
    UpdateFromTensors,
)
from tetrarch.engine.engine import Engine
from tetrarch.engine.messages import ControlReply, Flush
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.executor.step import Phase
from tetrarch.memory import journal

Make = Callable[..., Any]
Tensors = dict[str, Tensor]
Paths = tuple[Path, Path, Path]
PROMPT = (5, 3, 8, 200, 17, 9, 9, 40, 41, 42, 43)
LENGTH = 48  # tokens: goes on however long a call takes to decode
UP = "up_proj"


def request(rid: str, prompt: tuple[int, ...] = PROMPT, tokens: int = LENGTH) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        rid=rid, prompt_ids=prompt, sampling=sampling, return_logprobs=True, logprob_start=0
    )


@pytest.fixture(params=[False])
def desk(rank: Any, make_desk: Make, request: pytest.FixtureRequest) -> Any:
    """Over a real model, A; its steps overlap where a test asks for that."""
    schedule = replace(rank.plan.schedule, overlap=request.param)
    return make_desk(Engine(replace(rank.plan, schedule=schedule), rank))


OVERLAP = pytest.mark.parametrize("desk", [False, True], indirect=True)


@pytest.fixture(scope="module")
def alone(start_rank: Make, checkpoints: Paths) -> Callable[[int, tuple[int, ...], int], Any]:
    """Return what A (0) or B (1) says to a prompt, alone: tokens and their logprobs."""
    ranks = [start_rank(path) for path in checkpoints[:2]]

    def say(which: int, prompt: tuple[int, ...], count: int) -> Any:
        engine = Engine(ranks[which].plan, ranks[which])
        engine.add(request("a", prompt, count))
        tokens: list[int] = []
        logprobs: list[Any] = []
        while engine.has_work:
            for delta in engine.step():
                tokens += delta.token_ids
                logprobs += delta.logprobs
        return tuple(tokens), tuple(logprobs)

    return say


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Tensor]], bytes]:
    """Return what stands for the payload of some tensors; payloads have tests of their own."""
    box: dict[bytes, Tensors] = {}
    room = "tetrarch.engine.updates.decode_payload"
    monkeypatch.setattr(room, lambda data, load_format: box[data])

    def pack(tensors: Mapping[str, Tensor]) -> bytes:
        key = str(len(box)).encode()
        box[key] = dict(tensors)
        return key

    return pack


def halves(tensors: Tensors, word: str = UP) -> list[Tensors]:
    """Everything but what is called so, and then that."""
    return [{n: t for n, t in tensors.items() if (word in n) is turn} for turn in (False, True)]


def spans(desk: Any, rid: str) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in desk.deltas(rid)[-1].versions]


@OVERLAP
def test_running_requests_keep_their_tokens_and_are_computed_again_under_new_weights(
    desk: Any, rank: Any, checkpoints: Paths, alone: Any
) -> None:
    for rid in "ab":
        desk.send(request(rid))
    desk.turn(4)
    reply = desk.ask(UpdateFromDisk, path=str(checkpoints[1]))
    assert (reply.ok, reply.status, reply.payload["num_paused_requests"]) == (True, 200, 2)
    assert reply.payload["atomic"] is True
    assert (reply.payload["weight_version"], reply.payload["model_path"]) == (
        "1",
        str(checkpoints[1]),
    )
    desk.run()
    for rid in "ab":
        said = spans(desk, rid)
        kept = said[0][2]
        assert said == [("default", 0, kept), ("1", kept, LENGTH)]
        assert 0 < kept < LENGTH
        old, new = desk.tokens(rid)[:kept], desk.tokens(rid)[kept:]
        assert old == alone(0, PROMPT, LENGTH)[0][:kept]
        assert new == alone(1, PROMPT + old, LENGTH - kept)[0]
        assert new != alone(0, PROMPT, LENGTH)[0][kept:]
        assert desk.deltas(rid)[-1].num_retractions == 1
    desk.send(request("c"))
    desk.run()
    assert desk.tokens("c") == alone(1, PROMPT, LENGTH)[0], "a page of old weights lived on"


@OVERLAP
def test_without_a_flush_running_requests_keep_their_keys_and_values(
    desk: Any, rank: Any, checkpoints: Paths, alone: Any
) -> None:
    desk.send(request("a"))
    desk.turn(4)
    assert desk.ask(UpdateFromDisk, path=str(checkpoints[1]), flush_cache=False).ok
    desk.run()
    (_, _, kept), new = spans(desk, "a")
    assert new == ("1", kept, LENGTH)
    assert desk.deltas("a")[-1].num_retractions == 0
    assert [phase for phase, _, _ in rank.steps].count(Phase.PREFILL) == 1
    assert desk.tokens("a")[kept:] != alone(0, PROMPT, LENGTH)[0][kept:]


def test_a_prompt_half_scored_is_scored_again_under_the_new_weights(
    desk: Any, checkpoints: Paths, alone: Any
) -> None:
    desk.ask(Pause)
    desk.send(request("a", PROMPT * 4, 1))
    output = vars(desk.engine)["_live"]["a"]
    output.seq.scored = [None] * 3  # as after a first chunk
    desk.ask(UpdateFromDisk, path=str(checkpoints[1]))
    desk.ask(Continue)
    desk.run()
    assert len(desk.deltas("a")[-1].prompt_logprobs) == len(PROMPT) * 4 - 1
    assert None not in desk.deltas("a")[-1].prompt_logprobs


def test_no_step_sees_two_sets_of_weights(
    desk: Any,
    rank: Any,
    checkpoints: Paths,
    new_tensors: Tensors,
    post: Any,
    checksums: Any,
) -> None:
    """From disk, and from new_tensors in twenty calls, while requests come and go."""
    rank.is_watching = True
    desk.send(request("a"), request("b"))
    desk.turn(3)
    desk.ask(UpdateFromDisk, path=str(checkpoints[1]))
    desk.turn(3)
    desk.ask(UpdateFromDisk, path=str(checkpoints[0]))
    desk.turn(2)
    names = sorted(new_tensors)
    desk.ask(BeginUpdate)
    for index in range(20):
        part = {name: new_tensors[name] for name in names[index::20]}
        assert desk.ask(UpdateFromTensors, data=post(part)).ok
        desk.send(request(f"new {index}", tokens=2))
        assert index != 10 or rank.checksum() not in checksums, "then this would show nothing"
    count = len(rank.steps)
    assert desk.ask(EndUpdate).ok
    desk.run()
    seen = [(before, after) for _, before, after in rank.steps]
    assert all(before == after for before, after in seen)
    assert {before for before, _ in seen} == set(checksums)
    assert {before for before, _ in seen[count:]} == {checksums[1]}


def test_planning_goes_on_beside_the_steps(
    desk: Any, rank: Any, checkpoints: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, may_go = rank.weights.plan, threading.Event()

    def slow(*args: Any, **kw: Any) -> Any:
        may_go.wait(60)
        return plan(*args, **kw)

    monkeypatch.setattr(rank.weights, "plan", slow)
    desk.send(request("a"))
    ticket = desk.post(UpdateFromDisk, path=str(checkpoints[1]))
    for kind, fields in [
        (UpdateFromDisk, {"path": str(checkpoints[0])}),
        (BeginUpdate, {}),
        (UpdateFromTensors, {"data": b""}),
        (Release, {}),
        (CheckWeights, {"action": "reset_tensors"}),
    ]:
        reply = desk.ask(kind, **fields)
        assert (reply.ok, reply.status) == (False, 400)
        assert "another update" in reply.message
    desk.run()
    assert spans(desk, "a") == [("default", 0, LENGTH)]
    assert desk.reply(ticket) is None
    may_go.set()
    while desk.reply(ticket) is None:
        desk.turn()
    assert desk.reply(ticket).ok


def test_a_failed_update_disturbs_nobody(
    desk: Any,
    rank: Any,
    checkpoints: Paths,
    alone: Any,
    checksums: Any,
) -> None:
    desk.send(request("a"))
    desk.turn(4)
    for path, words in [(checkpoints[2], "served"), (Path("/nowhere"), "no checkpoint folder")]:
        reply = desk.ask(UpdateFromDisk, path=str(path))
        assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_weights")
        assert words in reply.message
    desk.run()
    assert desk.tokens("a") == alone(0, PROMPT, LENGTH)[0]
    assert desk.deltas("a")[-1].num_retractions == 0
    beat = desk.engine.heartbeat()
    assert (beat.weight_version, beat.model_path) == ("default", str(checkpoints[0]))
    assert rank.checksum() == checksums[0]


def test_inconsistent_weights_answer_503_until_a_full_update(
    desk: Any, rank: Any, checkpoints: Paths, alone: Any
) -> None:
    desk.send(request("a"))
    desk.turn(4)
    reply = desk.ask(UpdateFromDisk, path=str(checkpoints[2]), atomic=False)
    assert (reply.status, reply.code) == (400, "weights_inconsistent")
    assert desk.beat.state == "weights_inconsistent"
    desk.send(request("b"))
    assert (desk.finish("b").status, desk.finish("b").code) == (503, "weights_inconsistent")
    assert desk.finish("a") is None
    steps = len(rank.steps)
    assert desk.ask(UpdateFromDisk, path=str(checkpoints[1]), weight_version="rescue").ok
    assert len(rank.steps) <= steps + 1
    desk.run()
    kept = spans(desk, "a")[0][2]
    old = desk.tokens("a")[:kept]
    assert desk.tokens("a")[kept:] == alone(1, PROMPT + old, LENGTH - kept)[0]
    assert spans(desk, "a")[1][0] == "rescue"


def test_versions_count_updates_unless_they_are_given(
    desk: Any, checkpoints: Paths, new_tensors: Tensors, post: Any
) -> None:
    path = str(checkpoints[1])
    for version, told in [(None, "1"), ("seven", "seven"), (None, "3")]:
        reply = desk.ask(UpdateFromDisk, path=path, weight_version=version)
        assert reply.payload["weight_version"] == told
    norm = {"model.norm.weight": new_tensors["model.norm.weight"]}
    reply = desk.ask(UpdateFromTensors, data=post(norm))
    assert (reply.payload["weight_version"], reply.payload["model_path"]) == ("4", path)
    desk.ask(SetVersion, version="x")
    assert not desk.ask(UpdateFromDisk, path="/nowhere").ok
    assert desk.ask(UpdateFromDisk, path=path, dry_run=True).payload["weight_version"] == "x"
    desk.ask(BeginUpdate)
    reply = desk.ask(EndUpdate)
    assert (reply.ok, reply.payload["weight_version"]) == (True, "x"), "nothing was updated"


def test_a_dry_run_only_says_whether_it_would_work(
    desk: Any, rank: Any, checkpoints: Paths, checksums: Any
) -> None:
    reply = desk.ask(UpdateFromDisk, path=str(checkpoints[1]), dry_run=True)
    assert (reply.ok, reply.payload["atomic"], rank.checksum()) == (True, True, checksums[0])


def test_an_update_may_abort_and_may_stay_paused(desk: Any, checkpoints: Paths, alone: Any) -> None:
    desk.send(request("a"))
    desk.ask(UpdateFromDisk, path=str(checkpoints[1]), abort_all_requests=True, keep_pause=True)
    assert desk.finish("a").kind == "abort"
    assert desk.beat.is_paused
    desk.send(request("b"))
    assert desk.tokens("b") == ()
    desk.ask(Continue)
    desk.run()
    assert desk.tokens("b") == alone(1, PROMPT, LENGTH)[0]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_every_pause_goes_round_an_update(
    desk: Any, checkpoints: Paths, alone: Any, mode: str
) -> None:
    desk.send(request("a"))
    desk.turn(4)
    desk.ask(Pause, mode=mode)
    kept = len(desk.tokens("a"))
    desk.send(request("b"))
    reply = desk.ask(UpdateFromDisk, path=str(checkpoints[1]))
    assert reply.payload["num_paused_requests"] == (1 if mode == "abort" else 2)
    assert desk.ask(Flush).ok
    assert desk.ask(Continue).ok
    desk.run()
    assert desk.tokens("b") == alone(1, PROMPT, LENGTH)[0]
    if mode != "abort":
        old = desk.tokens("a")[:kept]
        assert desk.tokens("a")[kept:] == alone(1, PROMPT + old, LENGTH - kept)[0]


ENDS: dict[str, Callable[[Any], ControlReply]] = {
    "a flush": lambda desk: desk.ask(Flush),
    "continue": lambda desk: desk.ask(Continue),
    "an end": lambda desk: desk.ask(EndUpdate),
    "post processing": lambda desk: desk.ask(PostProcess, ends=True),
}


@pytest.fixture
def slow(post: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let payloads be decoded only once this is set."""
    may_go, decode = threading.Event(), updates.decode_payload

    def wait(data: bytes, load_format: str | None) -> Tensors:
        assert may_go.wait(60)
        return decode(data, load_format)

    monkeypatch.setattr(updates, "decode_payload", wait)
    return may_go


def test_steps_go_on_while_tensors_are_decoded_and_calls_are_answered_in_order(
    desk: Any,
    rank: Any,
    new_tensors: Tensors,
    post: Any,
    slow: threading.Event,
    checksums: Any,
    alone: Any,
) -> None:
    first, second = halves(new_tensors)
    desk.send(request("a"))
    desk.turn(3)
    told = len(desk.tokens("a"))
    tickets = [
        desk.post(UpdateFromTensors, data=post(first), flush_cache=False),
        desk.post(UpdateFromTensors, data=post(second), weight_version="v"),
        desk.post(SetVersion, version="w", abort_all_requests=False),
        desk.post(CheckWeights, action="checksum"),
    ]
    desk.turn(3)
    assert [desk.reply(ticket) for ticket in tickets] == [None] * 4
    assert len(desk.tokens("a")) > told + 3
    assert rank.checksum() == checksums[0]
    slow.set()
    while desk.reply(tickets[-1]) is None:
        for thread in threading.enumerate():
            if thread.name == "tensors are being decoded":
                thread.join(60)  # so that few steps pass
        desk.turn()
    replies = [desk.reply(ticket) for ticket in tickets]
    assert [m for m in desk.said if isinstance(m, ControlReply)] == replies
    assert all(reply.ok for reply in replies)
    assert [reply.payload.get("weight_version") for reply in replies[:2]] == ["default", "v"]
    assert replies[-1].payload["checksum"] == checksums[1]
    assert desk.beat.weight_version == "w"
    desk.run()
    kept = spans(desk, "a")[0][2]
    assert spans(desk, "a") == [("default", 0, kept), ("w", kept, LENGTH)]
    assert desk.tokens("a")[kept:] == alone(1, PROMPT + desk.tokens("a")[:kept], LENGTH - kept)[0]


def test_a_pause_does_not_wait_for_tensors_but_what_ends_it_does(
    desk: Any, new_tensors: Tensors, post: Any, slow: threading.Event
) -> None:
    ticket = desk.post(UpdateFromTensors, data=post(new_tensors))
    assert desk.ask(Pause, mode="retract").ok
    later = [desk.post(Continue), desk.post(Pause, mode="retract"), desk.post(Continue)]
    assert [desk.reply(one) for one in (ticket, *later)] == [None] * 4
    slow.set()
    while desk.reply(later[-1]) is None:
        desk.turn()
    assert all(desk.reply(one).ok for one in (ticket, *later))
    assert not desk.beat.is_paused


def test_a_payload_that_is_refused_holds_nothing_up(desk: Any, rank: Any, checksums: Any) -> None:
    tickets = [desk.post(UpdateFromTensors, data=b"no pickle") for _ in range(2)]
    while desk.reply(tickets[-1]) is None:
        desk.turn()
    for ticket in tickets:
        assert (desk.reply(ticket).status, desk.reply(ticket).code) == (400, "invalid_request")
    assert not rank.weights.is_open
    assert rank.checksum() == checksums[0]


def test_a_request_that_came_while_the_last_tensors_were_decoded_ends_the_update(
    desk: Any, new_tensors: Tensors, post: Any, slow: threading.Event, alone: Any
) -> None:
    first, second = halves(new_tensors)
    tickets = [
        desk.post(UpdateFromTensors, data=post(half), flush_cache=False) for half in (first, second)
    ]
    slow.set()
    while desk.reply(tickets[0]) is None:
        desk.turn()
    desk.send(request("a"))
    desk.run()
    assert desk.tokens("a") == alone(1, PROMPT, LENGTH)[0]
    assert desk.beat.weight_version == "1"


@pytest.mark.parametrize("end", ENDS)
def test_an_update_that_nobody_began_ends_with_what_relies_on_it(
    desk: Any, rank: Any, new_tensors: Tensors, post: Any, checksums: Any, end: str
) -> None:
    first, second = halves(new_tensors)
    reply = desk.ask(UpdateFromTensors, data=post(first), flush_cache=False)
    assert (reply.ok, reply.payload["is_open"]) == (True, True)
    assert any("up of expert 0" in words for words in reply.payload["unfinished"])
    reply = ENDS[end](desk)
    assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_weights")
    assert "half-complete" in reply.message
    assert "the old weights are served" in reply.message
    assert rank.checksum() == checksums[0]
    for half in (first, second):
        assert desk.ask(UpdateFromTensors, data=post(half), flush_cache=False).ok
    assert ENDS[end](desk).ok
    assert rank.checksum() == checksums[1]
    assert desk.beat.weight_version == "1"


def test_the_call_that_flushes_is_the_last_one(
    desk: Any,
    rank: Any,
    new_tensors: Tensors,
    post: Any,
    checksums: Any,
    alone: Any,
) -> None:
    desk.send(request("a"))
    desk.turn(4)
    first, second = halves(new_tensors)
    desk.ask(UpdateFromTensors, data=post(first), flush_cache=False, weight_version="v")
    count = len(rank.steps)
    reply = desk.ask(UpdateFromTensors, data=post(second))
    assert (reply.ok, reply.payload["is_open"], reply.payload["weight_version"]) == (
        True,
        False,
        "v",
    )
    assert reply.payload["num_paused_requests"] == 1
    assert len(rank.steps) <= count + 1, "it stepped between the calls"
    desk.run()
    kept = spans(desk, "a")[0][2]
    old = desk.tokens("a")[:kept]
    assert desk.tokens("a")[kept:] == alone(1, PROMPT + old, LENGTH - kept)[0]
    assert rank.checksum() == checksums[1]


@pytest.fixture
def heavier(checkpoints: Paths, new_tensors: Tensors, tmp_path: Path) -> tuple[Path, Tensors]:
    """B with tensors of an MTP head, which nothing here drafts with: a folder, and tensors."""
    extra = {"mtp.fc.weight": torch.ones(3), "mtp.layers.1.norm.weight": torch.ones(3)}
    folder = Path(shutil.copytree(checkpoints[1], tmp_path / "mtp"))
    save_file({**new_tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, extra


def test_what_is_left_out_is_told_alike_whichever_way_it_comes(
    desk: Any,
    heavier: tuple[Path, Tensors],
    new_tensors: Tensors,
    post: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, extra = heavier
    both = {**new_tensors, **extra}
    told = ["2 tensors were left out (mtp), such as mtp.fc.weight"]
    assert desk.ask(UpdateFromDisk, path=str(folder), dry_run=True).payload["warnings"] == told
    for kind, fields in [
        (UpdateFromDisk, {"path": str(folder)}),
        (UpdateFromTensors, {"data": post(both)}),
    ]:
        caplog.clear()
        reply = desk.ask(kind, **fields)
        assert (reply.ok, reply.payload["warnings"]) == (True, told)
        assert reply.payload["num_tensors"] == len(new_tensors)
        assert reply.payload["num_bytes"] == sum(one.nbytes for one in new_tensors.values())
        assert reply.message.startswith(f"updated {len(new_tensors)} tensors")
        assert reply.message.endswith(told[0])
        assert [one.levelname for one in caplog.records if told[0] in one.message] == ["WARNING"]


def test_each_call_tells_what_it_brought_for_nothing_and_the_last_one_all_of_it(
    desk: Any, rank: Any, heavier: tuple[Path, Tensors], new_tensors: Tensors, post: Any
) -> None:
    extra = heavier[1]
    for name in extra:
        reply = desk.ask(UpdateFromTensors, data=post({name: extra[name]}), flush_cache=False)
        assert (reply.ok, reply.payload["is_open"]) == (True, True)
        told = f"1 tensor was left out (mtp), such as {name}"
        assert reply.payload["warnings"] == [told]
        assert reply.message == f"took 0 tensors; the update goes on; {told}"
    reply = desk.ask(UpdateFromTensors, data=post(new_tensors))
    assert reply.payload["num_tensors"] == len(new_tensors)
    assert reply.payload["warnings"] == ["2 tensors were left out (mtp), such as mtp.fc.weight"]


def test_an_update_of_nothing_but_what_is_left_out_is_refused_and_changes_nothing(
    desk: Any, rank: Any, heavier: tuple[Path, Tensors], post: Any, checksums: Any
) -> None:
    reply = desk.ask(UpdateFromTensors, data=post(heavier[1]))
    assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_weights")
    assert "mtp.fc.weight (mtp); mtp.layers.1.norm.weight (mtp)" in reply.message
    assert rank.checksum() == checksums[0]
    desk.send(request("a"))
    desk.run()
    assert spans(desk, "a") == [("default", 0, LENGTH)]


def test_what_a_selector_leaves_out_is_told(
    desk: Any,
    rank: Any,
    new_tensors: Tensors,
    post: Any,
    checksums: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    norm = {"model.norm.weight": new_tensors["model.norm.weight"]}
    both = {"mtp.fc.weight": torch.ones(3), **norm}
    reply = desk.ask(UpdateFromTensors, data=post(both), selector="target", flush_cache=False)
    told = "1 tensor was left out (selector), such as mtp.fc.weight"
    assert (reply.ok, reply.payload["warnings"]) == (True, [told])
    reply = desk.ask(UpdateFromTensors, data=post(new_tensors), selector="target")
    assert (reply.payload["warnings"], reply.payload["num_tensors"]) == ([told], len(new_tensors))
    assert reply.message.endswith(told)
    assert [one.levelname for one in caplog.records if told in one.message] == ["WARNING"]
    assert rank.checksum() == checksums[1]


@pytest.mark.parametrize("begins", [False, True])
def test_an_update_of_nothing_but_what_a_selector_leaves_out_is_refused(
    desk: Any, rank: Any, new_tensors: Tensors, post: Any, checksums: Any, begins: bool
) -> None:
    norm = {"model.norm.weight": new_tensors["model.norm.weight"]}
    if begins:
        assert desk.ask(BeginUpdate, selector="draft").ok
        reply = desk.ask(UpdateFromTensors, data=post(norm))
        assert "model.norm.weight" in reply.message
        assert reply.ok
        reply = desk.ask(EndUpdate)
    else:
        reply = desk.ask(UpdateFromTensors, data=post(norm), selector="draft")
    assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_weights")
    assert "model.norm.weight (selector)" in reply.message
    assert (rank.weights.is_open, rank.checksum()) == (False, checksums[0])


def test_a_request_between_two_calls_gets_503_and_the_trainer_goes_on(
    desk: Any, new_tensors: Tensors, post: Any, alone: Any
) -> None:
    first, second = halves(new_tensors)
    desk.ask(UpdateFromTensors, data=post(first), flush_cache=False)
    desk.send(request("a"))
    finish = desk.finish("a")
    assert (finish.status, finish.code) == (503, "weights_inconsistent")
    assert "up of expert 0" in finish.message
    desk.ask(UpdateFromTensors, data=post(second), flush_cache=False)
    desk.send(request("b"))
    desk.run()
    assert desk.tokens("b") == alone(1, PROMPT, LENGTH)[0]
    assert spans(desk, "b") == [("1", 0, LENGTH)]
    assert_told_unasked(desk, len(new_tensors))


def assert_told_unasked(desk: Any, num_tensors: int) -> None:
    """No call has ended the update, and yet it is told once, to be timed."""
    reply = desk.reply(0)
    assert (reply.ok, reply.payload["num_tensors"]) == (True, num_tensors)
    assert (reply.payload["source"], reply.payload["seconds"] > 0) == ("tensor", True)


def probe(rid: str) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    return GenerateRequest(rid=rid, prompt_ids=(0,), sampling=sampling, is_probe=True)


@pytest.mark.parametrize("is_explicit", [False, True])
def test_a_probe_ends_no_update_and_waits_for_none(
    desk: Any, new_tensors: Tensors, post: Any, rank: Any, is_explicit: bool
) -> None:
    if is_explicit:
        desk.ask(BeginUpdate)
    assert desk.ask(UpdateFromTensors, data=post(new_tensors), flush_cache=False).ok
    desk.send(probe("health"))
    assert desk.finish("health").status == 503
    assert rank.weights.is_open
    assert (desk.beat.is_updating, desk.beat.state) == (True, "ready")
    assert desk.ask(EndUpdate).ok
    assert not desk.beat.is_updating
    desk.send(probe("again"))
    desk.run()
    assert desk.finish("again").kind == "length"


def test_the_last_call_may_be_repeated_after_its_answer_was_lost(
    desk: Any, new_tensors: Tensors, post: Any, rank: Any, checksums: Any
) -> None:
    first, second = halves(new_tensors)
    assert desk.ask(UpdateFromTensors, data=post(first), flush_cache=False).ok
    assert desk.ask(UpdateFromTensors, data=post(second), weight_version="v").ok
    for _ in range(2):
        copies = {name: value.clone() for name, value in second.items()}
        reply = desk.ask(UpdateFromTensors, data=post(copies), weight_version="v")
        assert (reply.ok, reply.payload["is_open"]) == (True, False)
        assert reply.payload["weight_version"] == desk.beat.weight_version == "v"
    assert rank.checksum() == checksums[1]
    other = {name: value + 1 for name, value in second.items()}
    assert not desk.ask(UpdateFromTensors, data=post(other)).ok, "other values are half a layer"
    assert rank.checksum() == checksums[1]


def test_a_trainer_that_died_mid_layer_is_not_waited_for(
    desk: Any, new_tensors: Tensors, post: Any, rank: Any, alone: Any, checksums: Any, silence: Any
) -> None:
    desk.send(request("a"))
    desk.turn(2)
    first, _ = halves(new_tensors)
    assert desk.ask(UpdateFromTensors, data=post(first), flush_cache=False).ok
    assert rank.weights.is_open
    silence()
    desk.run()
    assert desk.tokens("a") == alone(0, PROMPT, LENGTH)[0]
    assert (rank.weights.is_open, rank.state, rank.checksum()) == (False, "ready", checksums[0])
    assert not desk.beat.is_updating


def test_a_trainer_that_never_said_that_it_was_done_is_taken_to_be(
    desk: Any, new_tensors: Tensors, post: Any, rank: Any, alone: Any, checksums: Any, silence: Any
) -> None:
    assert desk.ask(UpdateFromTensors, data=post(new_tensors), flush_cache=False).ok
    silence()
    desk.turn()
    assert (rank.weights.is_open, rank.checksum()) == (False, checksums[1])
    assert desk.beat.weight_version == "1"
    assert_told_unasked(desk, len(new_tensors))


def test_an_explicit_update_waits_for_its_end_and_the_log_says_so(
    desk: Any,
    new_tensors: Tensors,
    post: Any,
    rank: Any,
    silence: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk.ask(BeginUpdate)
    assert desk.ask(UpdateFromTensors, data=post(halves(new_tensors)[0])).ok
    desk.send(request("a"))
    assert not caplog.records
    silence()
    desk.turn(2)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "1 requests wait; POST /end_weight_update" in caplog.text
    assert rank.weights.is_open
    beat = desk.engine.heartbeat()
    assert beat.is_updating
    assert beat.updating_s > 0


def test_a_trainer_that_overlooks_a_refusal_is_told_at_the_end(
    desk: Any, rank: Any, new_tensors: Tensors, post: Any, checksums: Any
) -> None:
    parts = [{n: t for n, t in new_tensors.items() if word in n} for word in ("norm", "lm_head")]
    bad = {"model.norm.weight": torch.full_like(new_tensors["model.norm.weight"], torch.nan)}
    assert desk.ask(UpdateFromTensors, data=post(parts[0]), flush_cache=False).ok
    for refused in (bad, {"no.such": torch.ones(2)}):
        assert not desk.ask(UpdateFromTensors, data=post(refused), flush_cache=False).ok
    reply = desk.ask(UpdateFromTensors, data=post(parts[1]))
    assert reply.ok
    assert rank.checksum() not in checksums, "the norms of the first call were taken back"
    [warning] = reply.payload["warnings"]
    assert "2 calls were refused before this update was done" in warning
    assert desk.ask(UpdateFromTensors, data=post(new_tensors)).payload["warnings"] == []


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what lets so much time pass that a trainer counts as dead."""

    def pass_time() -> None:
        monkeypatch.setattr(calls, "ABANDON_S", 0.0)
        monkeypatch.setattr(calls, "REMIND_S", 0.0)

    return pass_time


def test_while_paused_a_request_waits_and_ends_no_update(
    desk: Any, new_tensors: Tensors, post: Any, alone: Any
) -> None:
    desk.ask(Pause)
    first, second = halves(new_tensors)
    desk.ask(UpdateFromTensors, data=post(first), flush_cache=False)
    desk.send(request("a"))
    desk.ask(UpdateFromTensors, data=post(second), flush_cache=False)
    desk.ask(Continue)
    desk.run()
    assert desk.tokens("a") == alone(1, PROMPT, LENGTH)[0]


def test_an_explicit_update_holds_requests_until_its_end(
    desk: Any,
    rank: Any,
    new_tensors: Tensors,
    post: Any,
    alone: Any,
    checksums: Any,
) -> None:
    reply = desk.ask(BeginUpdate)
    assert reply.payload == {"atomic": True}
    again = desk.ask(BeginUpdate)
    assert (again.ok, again.status) == (False, 400)
    for half in halves(new_tensors):
        assert desk.ask(UpdateFromTensors, data=post(half)).payload["is_open"]
        desk.send(request(f"a {len(half)}"))
    assert not rank.steps
    assert not desk.ask(Release).ok
    assert not desk.ask(UpdateFromDisk, path="/nowhere").ok
    assert desk.ask(EndUpdate).payload["num_tensors"] == len(new_tensors)
    again = desk.ask(EndUpdate)
    assert (again.ok, again.status) == (False, 400)
    desk.run()
    for half in halves(new_tensors):
        assert desk.tokens(f"a {len(half)}") == alone(1, PROMPT, LENGTH)[0]
    assert rank.checksum() == checksums[1]


def test_older_trainers_bracket_an_update_in_their_own_words(
    desk: Any, rank: Any, new_tensors: Tensors, post: Any, checksums: Any
) -> None:
    for _ in range(2):
        assert desk.ask(PostProcess, begins=True).ok
    for half in halves(new_tensors):
        assert desk.ask(UpdateFromTensors, data=post(half)).ok
    for _ in range(2):
        assert desk.ask(PostProcess, ends=True).ok
    assert rank.checksum() == checksums[1]


def test_after_a_failed_call_an_explicit_update_takes_no_more(
    desk: Any, rank: Any, new_tensors: Tensors, post: Any, checksums: Any
) -> None:
    """A trainer that does not look at answers must not leave a mix behind."""
    layer = {n: t for n, t in new_tensors.items() if "layers.0." in n}
    bad = {n: torch.full_like(t, torch.nan) if UP in n else t for n, t in new_tensors.items()}
    desk.ask(BeginUpdate)
    assert desk.ask(UpdateFromTensors, data=post(layer)).ok
    bad = {n: t for n, t in bad.items() if n not in layer}
    assert not desk.ask(UpdateFromTensors, data=post(bad)).ok
    reply = desk.ask(UpdateFromTensors, data=post(layer))
    assert (reply.ok, reply.status) == (False, 400)
    assert "this update has failed" in reply.message
    assert not desk.ask(EndUpdate).ok
    assert rank.checksum() == checksums[0]
    assert desk.ask(BeginUpdate).ok
    assert desk.ask(UpdateFromTensors, data=post(new_tensors)).ok
    assert desk.ask(EndUpdate).ok
    assert rank.checksum() == checksums[1]


@pytest.mark.parametrize("source", ["disk", "tensors"])
def test_a_training_cycle_gives_back_memory_and_returns_bit_for_bit(
    desk: Any,
    rank: Any,
    checkpoints: Paths,
    post: Any,
    alone: Any,
    source: str,
) -> None:
    tensors = load_file(checkpoints[0] / "model.safetensors")
    assert desk.ask(Release).ok
    desk.send(request("no"))
    assert desk.finish("no").code == "weights_released"
    assert desk.ask(Resume, tags=("weights",)).ok
    desk.send(request("not yet"))
    assert desk.finish("not yet").code == "weights_not_loaded"
    if source == "disk":
        assert desk.ask(UpdateFromDisk, path=str(checkpoints[0])).ok
    else:
        for half in halves(tensors):
            assert desk.ask(UpdateFromTensors, data=post(half), flush_cache=False).ok
            desk.send(request(f"still not {len(half)}"))
        assert desk.finish(f"still not {len(halves(tensors)[0])}").code == "weights_not_loaded"
    desk.send(request("nearly"))
    assert desk.finish("nearly").code == "kv_released"
    assert desk.ask(Resume, tags=("kv_cache", "cuda_graph")).ok
    desk.send(request("a"))
    desk.run()
    tokens, logprobs = alone(0, PROMPT, LENGTH)
    assert desk.tokens("a") == tokens
    assert tuple(one for delta in desk.deltas("a") for one in delta.logprobs) == logprobs


def test_kept_weights_need_no_update(desk: Any, alone: Any) -> None:
    desk.ask(Release, backup=True)
    desk.ask(Resume)
    desk.send(request("a"))
    desk.run()
    assert desk.tokens("a") == alone(0, PROMPT, LENGTH)[0]
    assert spans(desk, "a") == [("default", 0, LENGTH)]


def test_no_room_for_an_undo_copy_is_said_and_a_failure_while_keeping_it_is_undone(
    desk: Any,
    rank: Any,
    checkpoints: Paths,
    checksums: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(vars(rank.weights), "_free_host", lambda: 0)
        reply = desk.ask(UpdateFromDisk, path=str(checkpoints[0]), dry_run=True)
        assert reply.payload["atomic"] is False
        reply = desk.ask(UpdateFromDisk, path=str(checkpoints[1]), atomic=True)
        assert (reply.ok, reply.status) == (False, 400)
        assert "does not fit in host memory" in reply.message
    keep, left = vars(journal)["_host_copy"], [20]

    def copy(tensor: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no host memory")
        return keep(tensor)

    monkeypatch.setattr(journal, "_host_copy", copy)
    reply = desk.ask(UpdateFromDisk, path=str(checkpoints[1]))
    assert (reply.ok, reply.status) == (False, 400)
    assert rank.checksum() == checksums[0]
