# SPDX-License-Identifier: Apache-2.0
"""The process that receives: it ends alone, and with whoever started it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

from tetrarch.core.errors import RequestError
from tetrarch.distributed.meeting import Meeting

if TYPE_CHECKING:
    from conftest import Joined, Trainer

Gone = Callable[[psutil.Process], bool]

ENGINE = """
import sys
import torch
from tetrarch.distributed.group import Meeting, WeightGroup
meeting = Meeting("127.0.0.1", int(sys.argv[1]), rank=1, world_size=2, name="w", backend="gloo")
group = WeightGroup.join(meeting, device=torch.device("cpu"), timeout=30)
print("joined", flush=True)
group.receive(["a"], ["uint8"], [[4]], load_format=None, timeout=60)
"""


def test_it_is_killed_while_it_waits(join: Callable[[str], Joined], gone: Gone) -> None:
    joined = join("waits")
    threading.Timer(0.5, joined.receiver.kill).start()
    began = time.monotonic()
    with pytest.raises(RequestError, match="has ended: code -9"):
        joined.receive(("uint8", [4]))
    assert time.monotonic() - began < 5
    assert not joined.group.is_open
    assert gone(joined.receiver)


def test_it_is_killed_while_nothing_happens(join: Callable[[str], Joined], gone: Gone) -> None:
    joined = join("idle")
    joined.receiver.kill()
    assert gone(joined.receiver)
    deadline = time.monotonic() + 5
    while joined.group.is_open:  # as soon as its last thread has ended
        assert time.monotonic() < deadline
    with pytest.raises(RequestError, match="closed"):
        joined.receive(("uint8", [4]))


def test_closing_ends_it_and_a_call_that_waits_for_it(
    join: Callable[[str], Joined], gone: Gone
) -> None:
    joined = join("closed")
    threading.Timer(0.5, joined.group.close).start()
    with pytest.raises(RequestError, match="has ended"):
        joined.receive(("uint8", [4]))
    assert gone(joined.receiver)


def test_it_ends_with_an_engine_that_is_killed(
    own_trainer: Trainer,
    meeting: Meeting,
    receivers_of: Callable[..., list[psutil.Process]],
    gone: Gone,
) -> None:
    """In the middle of a call, in which it waits on threads that torch runs."""
    own_trainer.tell(f"open_group('w', {meeting.port})")
    command = [sys.executable, "-c", ENGINE, str(meeting.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "joined\n"
        [receiver] = receivers_of(engine.pid)
        time.sleep(0.3)
        assert receiver.is_running()
        engine.kill()
    assert gone(receiver)


def test_its_memory_is_handed_over_and_not_kept(weights: Joined) -> None:
    size = 32 << 20
    weights.send(f"torch.ones({size}, dtype=torch.uint8)")
    [got] = weights.receive(("uint8", [size]))
    assert weights.sent()
    assert int(got.sum()) == size
    assert not [m for m in weights.receiver.memory_maps() if "tetrarch-weights" in m.path]
    assert [m for m in psutil.Process().memory_maps() if "tetrarch-weights" in m.path]
    del got
    assert not [m for m in psutil.Process().memory_maps() if "tetrarch-weights" in m.path]


def test_more_than_the_machine_holds_is_refused_beforehand(weights: Joined) -> None:
    size = psutil.virtual_memory().total
    with pytest.raises(RequestError, match="there is no room") as error:
        weights.receive(("uint8", [size]))
    assert error.value.param == "shapes"
    assert weights.group.is_open
