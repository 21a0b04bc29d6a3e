# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tetrarch.core.errors import RequestError
from tetrarch.distributed import nccl
from tetrarch.distributed.group import WeightGroup
from tetrarch.distributed.lifeline import Lifeline
from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.nccl import NcclLink, within
from tetrarch.distributed.parcel import Broadcast
from tetrarch.distributed.rendezvous import Connection

if TYPE_CHECKING:
    from conftest import Trainer

CPU = torch.device("cpu")
NEEDS_TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="nccl takes a GPU for each rank"
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_GRACE", 0.0)


class Store:
    """Of the trainer; only asked to wait no longer than we do."""

    def set_timeout(self, timeout: object) -> None:
        pass


class Backend:
    """NCCL whose first broadcast returns when `arrives` is set: all ranks have come."""

    def __init__(self) -> None:
        self.arrives = threading.Event()
        self.threads: list[threading.Thread] = []
        self.num_aborted = 0

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Backend:
        self.threads.append(threading.current_thread())
        self.arrives.wait(60)
        tensors[0].fill_(len(self.threads))
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object) -> None:
        pass

    def abort(self) -> None:
        self.num_aborted += 1


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def lifeline() -> Lifeline:
    return Lifeline()


@pytest.fixture
def link(
    backend: Backend, meeting: Meeting, lifeline: Lifeline, monkeypatch: pytest.MonkeyPatch
) -> NcclLink:
    monkeypatch.setattr(nccl, "connect", lambda *_: Connection(Store(), backend))  # pyright: ignore
    made = NcclLink(CPU)
    made.join(meeting, lifeline, 10)
    return made


def test_within_returns_or_raises_what_the_act_does() -> None:
    assert within(time.monotonic() + 10, lambda: 3, Lifeline()) == 3
    with pytest.raises(ValueError, match="literal"):
        within(time.monotonic() + 10, lambda: int("x"), Lifeline())


def test_a_rank_that_never_comes_is_waited_for_in_time_only(
    link: NcclLink, backend: Backend
) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        link.receive([Broadcast(4, b"")], timeout=0.2)
    assert time.monotonic() - began < 5
    link.close()
    assert not link.is_alive
    assert backend.num_aborted == 0, "it would wait for the thread that still meets"
    backend.arrives.set()
    backend.threads[0].join(5)
    assert not backend.threads[0].is_alive()


@pytest.mark.parametrize("ends", ["the trainer", "we"])
def test_ranks_that_meet_are_waited_for_no_longer_than_the_lifeline_holds(
    link: NcclLink, backend: Backend, lifeline: Lifeline, ends: str
) -> None:
    threading.Timer(0.2, lifeline.cut if ends == "the trainer" else link.close).start()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="hung up"):
        link.receive([Broadcast(4, b"")], timeout=60)
    assert 0.1 < time.monotonic() - began < 5
    link.close()
    backend.arrives.set()


def test_a_store_that_answers_nothing_is_given_up_with_the_lifeline(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, lifeline = threading.Event(), Lifeline()
    monkeypatch.setattr(nccl, "connect", lambda *_: answers.wait(60))
    threading.Timer(0.2, lifeline.cut).start()
    began, link = time.monotonic(), NcclLink(CPU)
    with pytest.raises(ConnectionError, match="hung up"):
        link.join(meeting, lifeline, 60)
    link.close()
    assert time.monotonic() - began < 5
    answers.set()


def test_ranks_meet_once_and_beside_the_caller(link: NcclLink, backend: Backend) -> None:
    backend.arrives.set()
    one, two = link.receive([Broadcast(4, b""), Broadcast(2, b"")], timeout=10)
    assert (one.tolist(), two.tolist()) == ([1] * 4, [2] * 2)
    assert backend.threads[0] is not threading.current_thread()
    assert backend.threads[1] is threading.current_thread()
    link.close()
    link.close()
    assert backend.num_aborted == 1


@pytest.mark.gpu
@NEEDS_TWO_GPUS
def test_nccl_brings_every_dtype_and_survives_a_dead_trainer(
    own_trainer: Trainer, meeting: Meeting
) -> None:
    trainer, place = own_trainer, replace(meeting, backend="nccl")
    device = torch.device("cuda:1")
    trainer.tell(f"open_group('weights', {place.port}, backend='nccl', timeout=60.0)")
    weights = WeightGroup(place, device)
    weights.join(60)
    assert trainer.answer() == "done"
    trainer.tell(
        'send("weights", *[numbers(t, 5).cuda() for t in'
        " (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn)])"
    )
    dtypes = ("float32", "bfloat16", "uint8", "float8_e4m3fn")
    got = weights.receive(dtypes, dtypes, [[5]] * 4, load_format=None, timeout=60)
    assert trainer.answer() == "done"
    for name, tensor in got.items():
        assert tensor.device == device
        assert tensor.dtype == getattr(torch, name)
        assert tensor.float().tolist() == [0, 1, 2, 3, 4]
    trainer.end()
    began = time.monotonic()
    with pytest.raises(RequestError, match="trainer died"):
        weights.receive(["a"], ["float32"], [[1 << 20]], load_format=None, timeout=3)
    time.sleep(3)  # what torch watches over groups with could end this process now
    assert time.monotonic() - began < 10
    assert torch.ones(3, device=device).sum() == 3


@pytest.mark.gpu
@NEEDS_TWO_GPUS
def test_nccl_does_not_wait_for_ever_for_a_third_rank(
    own_trainer: Trainer, meeting: Meeting
) -> None:
    place, device = replace(meeting, backend="nccl", world_size=3), torch.device("cuda:1")
    own_trainer.tell(
        f"open_group('weights', {place.port}, world_size=3, backend='nccl', timeout=60.0)"
    )
    weights = WeightGroup(place, device)
    weights.join(60)
    # It comes to the store, which would not let the trainer go on, and no further.
    third = dist.TCPStore("127.0.0.1", place.port, 3, is_master=False)
    assert own_trainer.answer() == "done"
    own_trainer.tell('send("weights", torch.ones(5).cuda())')
    began = time.monotonic()
    with pytest.raises(RequestError, match="the others do not answer"):
        weights.receive(["a"], ["float32"], [[5]], load_format=None, timeout=5)
    assert time.monotonic() - began < 10
    assert not weights.is_open
    assert torch.ones(3, device=device).sum() == 3  # the device is not held
    del third
    own_trainer.end()
    time.sleep(2)
    assert torch.ones(3, device=device).sum() == 3
