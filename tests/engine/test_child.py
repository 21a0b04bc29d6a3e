# SPDX-License-Identifier: Apache-2.0
"""The child's ends of the sockets; the whole child is in test_process.py."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tetrarch.engine import child
from tetrarch.engine.child import Link, LinkProgress
from tetrarch.engine.messages import (
    INBOUND,
    OUTBOUND,
    Heartbeat,
    LoadProgress,
    Snapshot,
    decode_outbound,
    encode,
)


class Parent:
    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self.inbound, self.outbound = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self.inbound.bind(f"ipc://{folder}/{INBOUND}")
        self.outbound.bind(f"ipc://{folder}/{OUTBOUND}")

    def hear(self) -> list[Any]:
        heard: list[Any] = []
        while self.outbound.poll(200):
            heard += decode_outbound(self.outbound.recv())
        return heard


@pytest.fixture
def ends() -> Iterator[tuple[Parent, Link]]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # pytest's own paths are long
        parent, link = Parent(Path(folder)), Link(folder)
        yield parent, link
        link.close()
        parent._context.destroy(linger=0)


def test_all_that_has_arrived_is_taken_at_once(ends: tuple[Parent, Link]) -> None:
    parent, link = ends
    assert link.take(0.0) == []
    sent = [encode(Snapshot(ticket=ticket)) for ticket in range(50)]
    for data in sent:
        parent.inbound.send(data)
    time.sleep(0.05)
    assert link.take(None) == sent


def test_last_words_arrive_although_the_link_closes(ends: tuple[Parent, Link]) -> None:
    parent, link = ends
    message = LoadProgress(label="x", total=1, unit="bytes", done=1)
    link.tell([message])
    link.close()
    assert parent.hear() == [message]


def test_the_heart_beats_while_nobody_steps(
    ends: tuple[Parent, Link],
    make_bench: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent, link = ends
    monkeypatch.setattr("tetrarch.engine.child._BEAT_S", 0.01)
    bench = make_bench()
    bench.add("a", [3, 4, 5])
    link.keep_telling(bench.engine)
    time.sleep(0.1)
    link.close()
    heard = parent.hear()
    assert len(heard) > 2
    assert all(isinstance(beat, Heartbeat) and beat.num_waiting == 1 for beat in heard)


def test_progress_is_told_a_few_times_and_always_to_the_end(ends: tuple[Parent, Link]) -> None:
    parent, link = ends
    progress = LinkProgress(link)
    progress.start("loading", 1000, "bytes")
    for _ in range(1000):
        progress.advance()
    progress.finish()
    heard = parent.hear()
    assert len(heard) < 20
    assert (heard[0].done, heard[0].total) == (0, 1000)
    assert (heard[-1].done, heard[-1].finished) == (1000, True)


def test_a_parent_that_ends_before_it_has_said_anything_is_no_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "tetrarch.engine.child"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_a_start_has_made_is_not_walked_again(
    ends: tuple[Parent, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a plan of 50,000 tensors the collector took the interpreter for 0.3 s at a time."""
    beat = Heartbeat(
        num_running=0,
        num_waiting=0,
        num_used_tokens=0,
        num_cached_tokens=0,
        max_total_tokens=0,
        counters={},
    )
    made = SimpleNamespace(
        **dict.fromkeys(("capacity", "load_report", "memory", "limits", "weight_version"), "x"),
        heartbeat=lambda: beat,
    )
    for name in ("Executor", "Engine", "load_tokenizer", "free_bytes"):
        monkeypatch.setattr(child, name, lambda *_, **__: made)
    monkeypatch.setattr(child, "msgspec", SimpleNamespace(to_builtins=lambda _: {}))
    plan: Any = SimpleNamespace(
        device="", model=SimpleNamespace(tokenizer_path="", skip_tokenizer=False)
    )
    gc.unfreeze()
    assert child._start(plan, ends[1]) is made
    count = gc.get_freeze_count()
    gc.unfreeze()
    assert count > 10_000
