# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.distributed import group
from tetrarch.distributed.group import WeightGroup
from tetrarch.distributed.meeting import Meeting

CPU = torch.device("cpu")

# A trainer, with the calls that the trainers' own helpers make; told what to do line by line.
TRAINER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

groups = {}

def open_group(name, port, world_size=2, timeout=20.0, backend="gloo"):
    limit = timedelta(seconds=timeout)
    store, rank, size = next(
        c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=limit)
    )
    store.set_timeout(limit)
    made, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store),
        group_name=name, backend_options=None, timeout=limit,
    )
    c10d._world.pg_group_ranks[made] = {index: index for index in range(size)}
    groups[name] = made

def send(name, *tensors):
    waits = [dist.broadcast(t, src=0, group=groups[name], async_op=True) for t in tensors]
    for wait in waits:
        wait.wait()

def close(name):
    dist.destroy_process_group(groups.pop(name))

def numbers(dtype, *shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)

for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
"""


class Trainer:
    """Rank 0, in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def shared() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.end()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def meeting(name: str = "weights") -> Meeting:
    return Meeting("127.0.0.1", free_port(), rank=1, world_size=2, name=name, backend="gloo")


@pytest.fixture
def joined(shared: Trainer) -> Iterator[Callable[[str], WeightGroup]]:
    made: list[WeightGroup] = []

    def join(name: str) -> WeightGroup:
        place = meeting(name)
        shared.tell(f"open_group({name!r}, {place.port})")
        made.append(WeightGroup.join(place, device=CPU, timeout=20))
        assert shared.answer() == "done"
        return made[-1]

    yield join
    for one in made:
        one.close()
        shared.tell(f"close({one.meeting.name!r})")
        shared.answer()


def receive(
    weights: WeightGroup,
    *announced: tuple[str, list[int]],
    load_format: str | None = None,
    timeout: float = 10,
) -> dict[str, Tensor]:
    names = [f"t{index}" for index in range(len(announced))]
    dtypes, shapes = zip(*announced, strict=True)
    return weights.receive(names, dtypes, shapes, load_format=load_format, timeout=timeout)


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def check_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.float(), expected.float())


def test_several_broadcasts_arrive_as_they_were_sent(
    shared: Trainer, joined: Callable[[str], WeightGroup]
) -> None:
    weights = joined("weights")
    shared.tell(
        'send("weights", numbers(torch.float32, 2, 3), numbers(torch.bfloat16, 5),'
        " numbers(torch.uint8, 4), numbers(torch.float32, 0, 3), numbers(torch.float32))"
    )
    got = receive(
        weights,
        *[("float32", [2, 3]), ("bfloat16", [5]), ("uint8", [4])],
        *[("float32", [0, 3]), ("float32", [])],
    )
    assert shared.answer() == "done"
    assert list(got) == ["t0", "t1", "t2", "t3", "t4"]
    check_same(got["t0"], numbers(torch.float32, 2, 3))
    check_same(got["t1"], numbers(torch.bfloat16, 5))
    check_same(got["t2"], numbers(torch.uint8, 4))
    check_same(got["t3"], torch.empty(0, 3))
    check_same(got["t4"], torch.tensor(0.0))

    # gloo sends no FP8 itself: trainers send its bytes
    shared.tell('send("weights", numbers(torch.float8_e4m3fn, 4).view(torch.uint8))')
    check_same(receive(weights, ("float8_e4m3fn", [4]))["t0"], numbers(torch.float8_e4m3fn, 4))
    assert shared.answer() == "done"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_tensor_shorter_than_announced_is_an_error_and_no_garbage(
    shared: Trainer, joined: Callable[[str], WeightGroup], load_format: str | None
) -> None:
    weights = joined("short")
    shared.tell('send("short", numbers(torch.float32, 4))')
    with pytest.raises(RequestError, match="shorter than announced"):
        receive(weights, ("float32", [8]), load_format=load_format)
    assert shared.answer() == "done"
    with pytest.raises(RequestError, match="an earlier broadcast failed"):
        receive(weights, ("float32", [4]))


def test_a_bucket_arrives_in_one_broadcast(
    shared: Trainer, joined: Callable[[str], WeightGroup]
) -> None:
    weights = joined("weights")
    shared.tell(
        'send("weights", torch.cat([t.flatten().view(torch.uint8) for t in'
        " (numbers(torch.float32, 3), numbers(torch.bfloat16, 2, 2))]))"
    )
    got = receive(weights, ("float32", [3]), ("bfloat16", [2, 2]), load_format="flattened_bucket")
    assert shared.answer() == "done"
    check_same(got["t0"], numbers(torch.float32, 3))
    check_same(got["t1"], numbers(torch.bfloat16, 2, 2))


def test_groups_live_side_by_side_without_a_default_group(
    shared: Trainer, joined: Callable[[str], WeightGroup]
) -> None:
    first, second = joined("first"), joined("second")
    shared.tell('send("second", numbers(torch.int32, 2)); send("first", numbers(torch.int64, 3))')
    check_same(receive(second, ("int32", [2]))["t0"], numbers(torch.int32, 2))
    check_same(receive(first, ("int64", [3]))["t0"], numbers(torch.int64, 3))
    assert shared.answer() == "done"
    assert not torch.distributed.is_initialized()


def test_a_name_is_free_again_after_closing(
    shared: Trainer, joined: Callable[[str], WeightGroup]
) -> None:
    weights = joined("weights")
    weights.close()
    weights.close()
    with pytest.raises(RequestError, match="closed"):
        receive(weights, ("uint8", [1]))
    shared.tell('close("weights")')
    assert shared.answer() == "done"
    again = joined("weights")
    shared.tell('send("weights", numbers(torch.uint8, 2))')
    check_same(receive(again, ("uint8", [2]))["t0"], numbers(torch.uint8, 2))
    assert shared.answer() == "done"


def test_a_bad_announcement_leaves_the_group_whole(
    shared: Trainer, joined: Callable[[str], WeightGroup]
) -> None:
    weights = joined("weights")
    for dtype, shape, load_format in (
        ("no_dtype", [1], None),
        ("uint8", [-1], None),
        ("uint8", [2**60], None),
        ("uint8", [1], "os.system"),
    ):
        with pytest.raises(RequestError):
            receive(weights, (dtype, shape), load_format=load_format)
    shared.tell('send("weights", numbers(torch.uint8, 2))')
    check_same(receive(weights, ("uint8", [2]))["t0"], numbers(torch.uint8, 2))
    assert shared.answer() == "done"


def test_a_silent_trainer_breaks_the_group_in_time(
    shared: Trainer, joined: Callable[[str], WeightGroup]
) -> None:
    weights = joined("weights")
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"did not send it all in 0\.5 s"):
        receive(weights, ("uint8", [2]), timeout=0.5)
    assert not weights.is_open
    with pytest.raises(RequestError, match="broadcast failed"):
        receive(weights, ("uint8", [2]))
    assert time.monotonic() - started < 5


def test_a_trainer_killed_mid_broadcast_is_an_error() -> None:
    trainer, place = Trainer(), meeting()
    try:
        trainer.tell(f"open_group('weights', {place.port})")
        weights = WeightGroup.join(place, device=CPU, timeout=20)
        assert trainer.answer() == "done"
        trainer.tell("import os, signal; send('weights', torch.ones(4)); os.kill(os.getpid(), 9)")
        started = time.monotonic()
        with pytest.raises(RequestError, match="trainer died"):
            receive(weights, ("float32", [4]), ("float32", [1 << 20]), timeout=15)
        assert time.monotonic() - started < 10
        weights.close()
    finally:
        trainer.end()


def test_a_wrong_world_size_times_out(shared: Trainer) -> None:
    place = meeting()
    shared.tell("'is it up?'")
    assert shared.answer() == "done"
    shared.tell(f"open_group('weights', {place.port}, world_size=2, timeout=1.0)")
    started = time.monotonic()
    with pytest.raises(RequestError, match="did not come within 1 s"):
        WeightGroup.join(replace(place, world_size=3), device=CPU, timeout=1)
    assert time.monotonic() - started < 5
    assert shared.answer()


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"world_size": 1}, "world_size"),
        ({"address": "no.such.host.invalid"}, "master_address"),
        ({"address": "x" * 300}, "master_address"),
        ({"address": "nul\0"}, "master_address"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused_at_once(wrong: dict[str, object], param: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError) as error:
        WeightGroup.join(replace(meeting(), **wrong), device=CPU, timeout=20)
    assert error.value.param == param
    assert time.monotonic() - started < 5


def test_a_trainer_that_never_opens_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_OPENS_WITHIN", 0.2)
    with pytest.raises(RequestError, match="nothing can be reached"):
        WeightGroup.join(meeting(), device=CPU, timeout=60)


def test_a_port_that_is_no_store_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as dumb:
        place = replace(meeting(), port=dumb.getsockname()[1])
        started = time.monotonic()
        with pytest.raises(RequestError):
            WeightGroup.join(place, device=CPU, timeout=1)
        assert time.monotonic() - started < 5


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl takes a GPU for each rank")
def test_nccl_brings_every_dtype_and_survives_a_dead_trainer() -> None:
    trainer, place = Trainer(), replace(meeting(), backend="nccl")
    device = torch.device("cuda:1")
    try:
        trainer.tell(f"open_group('weights', {place.port}, backend='nccl', timeout=60.0)")
        weights = WeightGroup.join(place, device=device, timeout=60)
        assert trainer.answer() == "done"
        trainer.tell(
            'send("weights", *[numbers(t, 5).cuda() for t in'
            " (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn)])"
        )
        dtypes = ("float32", "bfloat16", "uint8", "float8_e4m3fn")
        got = receive(weights, *[(dtype, [5]) for dtype in dtypes], timeout=60)
        assert trainer.answer() == "done"
        for tensor in got.values():
            assert tensor.device == device
            check_same(tensor.cpu(), numbers(tensor.dtype, 5))
    finally:
        trainer.end()
    started = time.monotonic()
    with pytest.raises(RequestError, match="trainer died"):
        receive(weights, ("float32", [1 << 20]), timeout=3)
    time.sleep(3)  # what torch watches over groups with could end this process now
    assert time.monotonic() - started < 10
    assert torch.ones(3, device=device).sum() == 3
