# SPDX-License-Identifier: Apache-2.0
"""A trainer, rank 0, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest
import torch
from torch import Tensor

from tetrarch.distributed.group import WeightGroup
from tetrarch.distributed.meeting import Meeting

# With the calls that the trainers' own helpers make; told what to do line by line.
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
    """Told what to do; answers `done`, or what went wrong."""

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


class Joined:
    """A group that a trainer and we have joined."""

    def __init__(self, trainer: Trainer, place: Meeting) -> None:
        self._trainer, self.name = trainer, place.name
        before = receivers()
        trainer.tell(f"open_group({place.name!r}, {place.port})")
        self.group = WeightGroup(place, torch.device("cpu"))
        self.group.join(30)
        assert trainer.answer() == "done"
        [self.receiver] = [one for one in receivers() if one not in before]

    def send(self, tensors: str) -> None:
        """Let the trainer begin to broadcast."""
        self._trainer.tell(f"send({self.name!r}, {tensors})")

    def sent(self) -> bool:
        """Wait until it has, or failed."""
        return self._trainer.answer() == "done"

    def receive(
        self,
        *announced: tuple[str, Sequence[int]],
        load_format: str | None = None,
        timeout: float = 30,
    ) -> list[Tensor]:
        """Receive what is announced by dtype and shape."""
        names = [f"t{index}" for index in range(len(announced))]
        dtypes, shapes = zip(*announced, strict=True)
        got = self.group.receive(names, dtypes, shapes, load_format=load_format, timeout=timeout)
        assert list(got) == names
        return list(got.values())

    def leave(self) -> None:
        self.group.close()
        self._trainer.tell(f"close({self.name!r})")
        self._trainer.answer()


def receivers(of: int | None = None) -> list[psutil.Process]:
    """Return the processes that receive for a process, ours by default."""
    lives = [c for c in psutil.Process(of).children() if c.status() != psutil.STATUS_ZOMBIE]
    return [one for one in lives if "tetrarch.distributed.receiver" in one.cmdline()]


def is_gone(process: psutil.Process, *, within: float = 5) -> bool:
    """Whether a process ends in time, or has."""
    deadline = time.monotonic() + within
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def place(name: str = "weights") -> Meeting:
    """A meeting on this host at a port where nobody is yet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return Meeting("127.0.0.1", port, rank=1, world_size=2, name=name, backend="gloo")


@pytest.fixture
def meeting() -> Meeting:
    return place()


@pytest.fixture
def own_trainer() -> Iterator[Trainer]:
    """The test's own, to kill."""
    trainer = Trainer()
    yield trainer
    trainer.end()


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.end()


@pytest.fixture(scope="module")
def weights(trainer: Trainer) -> Iterator[Joined]:
    """A group for all tests that leave it whole: to join one takes seconds."""
    joined = Joined(trainer, place("shared by tests"))
    yield joined
    joined.leave()


@pytest.fixture
def join(trainer: Trainer) -> Iterator[Callable[[str], Joined]]:
    """Joins a group of the test's own."""
    made: list[Joined] = []

    def join(name: str) -> Joined:
        made.append(Joined(trainer, place(name)))
        return made[-1]

    yield join
    for one in made:
        one.leave()


@pytest.fixture
def gone() -> Callable[[psutil.Process], bool]:
    """Whether a process ends in time, or has."""
    return is_gone


@pytest.fixture
def receivers_of() -> Callable[[int | None], list[psutil.Process]]:
    """The processes that receive for a process."""
    return receivers
