# SPDX-License-Identifier: Apache-2.0
"""Tensors from a trainer's group: received beside the steps, taken between two of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.distributed.group import Meeting
from tetrarch.engine.actions import (
    BeginUpdate,
    DestroyGroup,
    EndUpdate,
    InitGroup,
    UpdateFromDisk,
    UpdateFromDistributed,
)
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.request import GenerateRequest, SamplingParams

Tensors = dict[str, Tensor]

UP = "up_proj"


def request(rid: str, tokens: int = 16) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, prompt_ids=(5, 3, 8, 200, 17), sampling=sampling)


def halves(tensors: Tensors) -> list[Tensors]:
    """Everything but one half of every pair, and then that."""
    return [{n: t for n, t in tensors.items() if (UP in n) is turn} for turn in (False, True)]


def spans(desk: Any, rid: str) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in desk.deltas(rid)[-1].versions]


@pytest.fixture
def desk(model_desk: Any) -> Any:
    """Over a real model, A."""
    return model_desk


class Trainer:
    """Stands for a group: what is received is handed over here, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: Tensors | None = None
        self.sends = threading.Event()
        self.is_open = True
        self.num_closed = 0
        self.comes = threading.Event()
        self.comes.set()
        monkeypatch.setattr("tetrarch.engine.groups.WeightGroup", self.make)

    def make(self, meeting: Meeting, device: torch.device) -> Trainer:
        self.meeting, self.is_open = meeting, True
        return self

    def join(self, timeout: float) -> None:
        assert self.comes.wait(timeout)

    def receive(self, names: tuple[str, ...], *_: object, **__: object) -> Tensors:
        assert self.sends.wait(60)
        if self.tensors is None or not self.is_open:
            self.is_open = False
            raise RequestError("the trainer died", why="it was killed", fix="start it again")
        return {name: self.tensors[name] for name in names}

    def close(self) -> None:
        self.is_open = False
        self.num_closed += 1


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    made = Trainer(monkeypatch)
    yield made
    made.sends.set()
    made.comes.set()


WHERE = {"master_address": "here", "master_port": 1, "rank_offset": 1, "world_size": 2}


def join(desk: Any) -> ControlReply:
    return desk.ask(InitGroup, **WHERE)


def announced(tensors: Tensors) -> dict[str, Any]:
    return {
        "names": tuple(tensors),
        "dtypes": tuple("float32" for _ in tensors),
        "shapes": tuple(tuple(tensor.shape) for tensor in tensors.values()),
    }


def test_tensors_from_a_group_arrive_beside_the_steps_and_are_taken_between_two(
    desk: Any, rank: Any, trainer: Trainer, new_tensors: Tensors, checksums: Any
) -> None:
    assert join(desk).ok
    again = join(desk)
    assert (again.ok, again.status) == (False, 400)
    desk.send(request("a", tokens=30))
    desk.turn(2)
    first, second = halves(new_tensors)
    ticket = desk.post(UpdateFromDistributed, flush_cache=False, **announced(first))
    count = len(rank.steps)
    desk.turn(3)
    assert len(rank.steps) == count + 3
    trainer.tensors = new_tensors
    trainer.sends.set()
    while desk.reply(ticket) is None:
        desk.turn()
    assert desk.reply(ticket).payload["is_open"]
    count = len(rank.steps)
    reply = desk.ask(UpdateFromDistributed, **announced(second))
    assert (reply.ok, reply.payload["is_open"]) == (True, False)
    assert len(rank.steps) <= count + 1
    assert rank.checksum() == checksums[1]
    assert desk.ask(DestroyGroup).ok
    assert trainer.num_closed == 1
    reply = desk.ask(DestroyGroup)
    assert (reply.ok, reply.status) == (False, 400)


def test_what_is_left_out_of_a_broadcast_is_told(
    desk: Any, rank: Any, trainer: Trainer, new_tensors: Tensors, checksums: Any
) -> None:
    join(desk)
    trainer.tensors = {**new_tensors, "mtp.fc.weight": torch.ones(2)}
    trainer.sends.set()
    reply = desk.ask(UpdateFromDistributed, **announced(trainer.tensors))
    assert (reply.ok, reply.payload["num_tensors"]) == (True, len(new_tensors))
    assert reply.payload["warnings"] == ["1 tensor was left out (mtp), such as mtp.fc.weight"]
    assert rank.checksum() == checksums[1]


def test_a_sender_that_dies_changes_nothing(
    desk: Any, rank: Any, trainer: Trainer, new_tensors: Tensors, checksums: Any
) -> None:
    join(desk)
    desk.send(request("a"))
    trainer.sends.set()
    reply = desk.ask(UpdateFromDistributed, **announced(new_tensors))
    assert (reply.ok, reply.status) == (False, 400)
    assert "the trainer died" in reply.message
    desk.run()
    assert spans(desk, "a") == [("default", 0, 16)]
    assert rank.checksum() == checksums[0]
    reply = desk.ask(UpdateFromDistributed, **announced(new_tensors))
    assert "there is no weight group" in reply.message
    assert join(desk).ok, "its name is free"


def test_a_group_that_broke_while_nothing_happened_can_be_joined_again(
    desk: Any, rank: Any, trainer: Trainer, new_tensors: Tensors, checksums: Any
) -> None:
    assert join(desk).ok
    trainer.is_open = False
    assert join(desk).ok
    trainer.is_open, trainer.tensors = True, new_tensors
    trainer.sends.set()
    assert desk.ask(UpdateFromDistributed, **announced(new_tensors)).ok
    assert rank.checksum() == checksums[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ("no.such.weight",)}, "1 unexpected: no.such.weight"),
        ({"shapes": ((16,),)}, "values of shape (16,)"),
        ({"dtypes": ("int32",)}, "model.norm.weight"),
        ({"dtypes": ("int3",)}, "no dtype"),
    ],
)
def test_what_cannot_be_taken_is_refused_before_it_is_awaited_and_closes_the_group(
    desk: Any,
    rank: Any,
    trainer: Trainer,
    new_tensors: Tensors,
    checksums: Any,
    change: dict[str, Any],
    words: str,
) -> None:
    """Nobody sends here: a call that waited would wait for a minute."""
    join(desk)
    first, second = halves(new_tensors)
    second["model.norm.weight"] = first.pop("model.norm.weight")
    trainer.tensors = new_tensors
    trainer.sends.set()
    assert desk.ask(UpdateFromDistributed, flush_cache=False, **announced(first)).ok
    trainer.sends.clear()
    norm = announced({"model.norm.weight": new_tensors["model.norm.weight"]})
    reply = desk.ask(UpdateFromDistributed, **{**norm, **change})
    assert (reply.ok, reply.status) == (False, 400)
    for part in (words, "nothing was received, and weight group", "is closed"):
        assert part in reply.message
    assert trainer.num_closed == 1
    assert "there is no weight group" in desk.ask(UpdateFromDistributed, **norm).message
    assert rank.weights.is_open, "the update goes on"
    assert join(desk).ok, "its name is free"
    trainer.sends.set()
    assert desk.ask(UpdateFromDistributed, **announced(second)).ok
    assert rank.checksum() == checksums[1]


def test_a_repeated_tensor_is_not_refused_when_it_is_announced(
    desk: Any, rank: Any, trainer: Trainer, new_tensors: Tensors, checksums: Any
) -> None:
    join(desk)
    trainer.tensors = new_tensors
    trainer.sends.set()
    for flush in (False, False, True):
        assert desk.ask(UpdateFromDistributed, flush_cache=flush, **announced(new_tensors)).ok
    assert rank.checksum() == checksums[1]


@pytest.mark.parametrize("begins", [True, False])
def test_a_sender_that_dies_after_some_layers_takes_them_with_it(
    desk: Any, rank: Any, trainer: Trainer, new_tensors: Tensors, checksums: Any, begins: bool
) -> None:
    """Whole layers are written by then; served with those that never came they would be a mix."""
    layer = {name: tensor for name, tensor in new_tensors.items() if "layers.0." in name}
    rest = {name: tensor for name, tensor in new_tensors.items() if name not in layer}
    join(desk)
    if begins:
        assert desk.ask(BeginUpdate).ok
    trainer.tensors = new_tensors
    trainer.sends.set()
    assert desk.ask(UpdateFromDistributed, flush_cache=False, **announced(layer)).ok
    assert rank.checksum() not in checksums, "then this would show nothing"
    trainer.tensors = None
    reply = desk.ask(UpdateFromDistributed, flush_cache=False, **announced(rest))
    assert (reply.ok, reply.status) == (False, 400)
    assert "the trainer died" in reply.message
    assert rank.checksum() == checksums[0]
    ended = desk.ask(EndUpdate)
    assert (ended.ok, ended.status) == (False, 400)
    desk.send(request("a"))
    desk.run()
    assert spans(desk, "a") == [("default", 0, 16)]


def test_a_meeting_that_cannot_be_is_refused_while_steps_go_on(desk: Any) -> None:
    """The group's own checks: nothing stands in for it here."""
    desk.send(request("a"))
    reply = join(desk)
    assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_request")
    assert "nccl needs CUDA" in reply.message
    desk.run()
    assert spans(desk, "a") == [("default", 0, 16)]
    reply = desk.ask(UpdateFromDistributed, **announced({"x": torch.ones(1)}))
    assert (reply.ok, reply.status) == (False, 400)
    assert "there is no weight group" in reply.message


def until_answered(desk: Any, ticket: int) -> ControlReply:
    while (reply := desk.reply(ticket)) is None:
        desk.turn()
    return reply


def test_a_group_is_destroyed_while_it_is_being_joined(
    desk: Any, rank: Any, checkpoints: tuple[Path, ...], new_tensors: Tensors
) -> None:
    """Nothing stands in for the group here, and no trainer ever comes."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        place = {**WHERE, "master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        began, ticket = time.monotonic(), desk.post(InitGroup, **place)
        for kind, fields in ((InitGroup, place), (UpdateFromDistributed, announced(new_tensors))):
            reply = desk.ask(kind, **fields)
            assert (reply.ok, reply.status) == (False, 400)
        assert desk.reply(ticket) is None
        destroyed = desk.ask(DestroyGroup)
        assert (destroyed.ok, destroyed.status) == (True, 200)
        reply = until_answered(desk, ticket)
        assert time.monotonic() - began < 10, "it waits for twenty seconds otherwise"
    assert (reply.ok, reply.status, reply.code) == (False, 400, "invalid_request")
    assert "it was destroyed while it was being joined" in reply.message
    assert "there is no weight group" in desk.ask(DestroyGroup).message
    assert desk.ask(UpdateFromDisk, path=str(checkpoints[0])).ok, "nothing is held up"


def test_a_group_that_is_destroyed_as_the_last_rank_comes_is_not_kept(
    desk: Any, trainer: Trainer
) -> None:
    trainer.comes.clear()
    ticket = desk.post(InitGroup, **WHERE)
    assert desk.ask(DestroyGroup).ok
    trainer.comes.set()
    reply = until_answered(desk, ticket)
    assert (reply.ok, reply.status) == (False, 400)
    assert "destroyed as soon as it was joined" in reply.message
    assert join(desk).ok, "its name is free"


def test_a_join_that_fails_leaves_an_open_update_alone(desk: Any) -> None:
    assert desk.ask(BeginUpdate).ok
    ticket = desk.post(
        InitGroup, **{**WHERE, "master_address": "no.such.host.invalid", "backend": "gloo"}
    )
    assert not until_answered(desk, ticket).ok
    assert "there is no weight group" in desk.ask(DestroyGroup).message
    assert desk.ask(EndUpdate).ok


def test_nothing_else_changes_weights_while_a_trainer_is_awaited(
    desk: Any, trainer: Trainer, new_tensors: Tensors
) -> None:
    join(desk)
    ticket = desk.post(UpdateFromDistributed, **announced(new_tensors))
    reply = desk.ask(UpdateFromDisk, path="/nowhere")
    assert (reply.ok, reply.status) == (False, 400)
    assert "tensors are being received" in reply.message
    assert desk.ask(DestroyGroup).ok
    trainer.sends.set()
    while desk.reply(ticket) is None:
        desk.turn()
    assert not desk.reply(ticket).ok
