# SPDX-License-Identifier: Apache-2.0
"""Captured forwards: a recorder that runs again stands for CUDA's, so that the CPU shows what a
bucket computes, what it writes, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tetrarch.core.progress import NoProgress
from tetrarch.executor.buckets import Bucket
from tetrarch.executor.executor import Executor
from tetrarch.executor.graphs import Graphs, Replay
from tetrarch.executor.step import SampleSpec

Start = Callable[..., Executor]
Serve = Callable[..., list[list[int]]]
GREEDY = SampleSpec(temperature=0.0, top_logprobs=0)


class Rerun:
    """Records by remembering the function."""

    def __init__(self) -> None:
        self.num_records = 0

    def record(self, run: Replay) -> Replay:
        self.num_records += 1
        run()
        return run


class Bar(NoProgress):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def start(self, label: str, total: int, unit: str) -> None:
        self.told.append((label, total, unit))

    def advance(self, amount: int = 1) -> None:
        self.told.append(amount)


def captured(executor: Executor, *buckets: Bucket, recorder: Rerun | None = None) -> Graphs:
    """Give an executor graphs; the last page of its pool becomes the spare one."""
    graphs = Graphs(executor._model, executor._pool, buckets=buckets, pages_per_seq=20)
    graphs.capture(recorder or Rerun(), NoProgress())
    executor._graphs = graphs
    capacity = executor.capacity
    executor.capacity = type(capacity)(capacity.num_pages - 1, capacity.page_size)
    for table in (executor._pool.slots, graphs.slots):
        for name, slot in table.items():
            if slot.is_floating_point() and not name.startswith("spare"):
                slot.fill_(torch.nan)
    return graphs


@pytest.fixture(scope="module")
def pair(demo_path: Path, start_rank: Start) -> tuple[Executor, Executor]:
    """The demo model twice: as it is, and with a draft's weights too."""
    return (start_rank(demo_path), start_rank(demo_path, speculative_algorithm="mtp"))


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, 1024) for _ in range(rng.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tokens_are_those_of_plain_steps_in_full_and_padded_buckets(
    demo_path: Path, start_rank: Start, serve: Serve, count: int
) -> None:
    """Pages and results are poisoned: what a bucket reads beyond its batch would show."""
    executor = start_rank(demo_path)
    want = serve(executor, prompts(count), num_new=9, chunk_tokens=4)
    graphs = captured(executor, Bucket(1, 1), Bucket(2, 1), Bucket(4, 1))
    assert serve(executor, prompts(count), num_new=9, chunk_tokens=4) == want
    assert graphs.num_replays >= 8
