# SPDX-License-Identifier: Apache-2.0
"""The process itself; how it fails is in test_gloo.py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tetrarch.distributed.meeting import Meeting

if TYPE_CHECKING:
    from conftest import Joined, Trainer

Gone = Callable[[psutil.Process], bool]

ENGINE = """
import sys
import torch
from tetrarch.distributed.group import Meeting, WeightGroup
meeting = Meeting("127.0.0.1", int(sys.argv[1]), rank=1, world_size=2, name="w", backend="gloo")
group = WeightGroup(meeting, torch.device("cpu"))
group.join(30)
print("joined", flush=True)
group.receive(["a"], ["uint8"], [[4]], load_format=None, timeout=60)
"""


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


def test_the_system_ends_it_before_others_and_it_leaves_no_dump(weights: Joined) -> None:
    folder = Path("/proc") / str(weights.receiver.pid)
    assert (folder / "oom_score_adj").read_text().strip() == "1000"
    assert weights.receiver.rlimit(psutil.RLIMIT_CORE) == (0, 0)
