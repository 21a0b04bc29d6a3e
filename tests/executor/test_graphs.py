# SPDX-License-Identifier: Apache-2.0
"""Captured forwards: a recorder that runs again stands for CUDA's, so that the CPU shows what a
bucket computes, what it writes, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from tetrarch.core.errors import AddressChanged
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.executor.buckets import AnyBucket, Bucket, PromptBucket
from tetrarch.executor.capacity import Capacity
from tetrarch.executor.executor import Executor
from tetrarch.executor.graphs import Graphs, Replay
from tetrarch.executor.step import DraftWork, Phase, SampleSpec, SeqChunk, Step
from tetrarch.memory.arena import HostArena

Start = Callable[..., Executor]
Serve = Callable[..., list[list[int]]]
GREEDY = SampleSpec(temperature=0.0, top_logprobs=0)


class Rerun:
    """Records by remembering the function."""

    def record(self, run: Replay) -> Replay:
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


def capture(
    executor: Executor,
    *buckets: AnyBucket,
    progress: Progress | None = None,
    arena: HostArena | None = None,
) -> Graphs:
    """Give an executor graphs; the last page of its pool becomes the spare one.

    The pool and the results are poisoned: what nobody should read shows in the tokens.
    """
    graphs = Graphs(executor._model, executor._pool, buckets=buckets, pages_per_seq=20, arena=arena)
    graphs.capture(Rerun(), progress or NoProgress())
    executor._graphs = graphs
    capacity = executor.capacity
    executor.capacity = Capacity(capacity.num_pages - 1, capacity.page_size)
    for slot in chain(executor._pool.slots.values(), graphs.slots.values()):
        if slot.is_floating_point():
            slot.fill_(torch.nan)
    return graphs


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, 1024) for _ in range(rng.randint(1, 12))] for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tokens_are_those_of_plain_steps_in_full_buckets_and_in_padded_ones(
    demo_path: Path, start_rank: Start, serve: Serve, count: int
) -> None:
    executor = start_rank(demo_path, quantization="none")
    want = serve(executor, prompts(count), num_new=9, chunk_tokens=4)
    graphs = capture(executor, Bucket(1, 1), Bucket(2, 1), Bucket(4, 1))
    assert serve(executor, prompts(count), num_new=9, chunk_tokens=4) == want
    assert graphs.num_replays >= 8


def draft_steps(executor: Executor, count: int, *, most: int) -> list[tuple[int, ...]]:
    """Return what sequences say that verify up to `most` drafts, not all of them as many."""
    tokens = prompts(count)
    rng = random.Random(count)
    done = [0] * count
    drafts: list[tuple[int, ...]] = [()] * count
    for turn in range(6):
        seqs = tuple(
            SeqChunk(
                row=row,
                token_ids=(*tokens[row][done[row] :], *drafts[row]),
                start=done[row],
                pages=tuple(range(row * 12, row * 12 + 12)),
                samples=(GREEDY,) * (len(drafts[row]) + 1),
                draft=DraftWork(next_id=None, num_drafts=rng.randint(0, most)),
            )
            for row in range(count)
        )
        num_tokens = sum(len(seq.token_ids) for seq in seqs)
        phase = Phase.VERIFY if turn else Phase.PREFILL
        step = Step(phase=phase, seqs=seqs, rank_tokens=(num_tokens,))
        for row, result in enumerate(executor.step(step).seqs):
            tokens[row] += result.token_ids
            done[row] = len(tokens[row]) - 1
            drafts[row] = result.drafts
    return [tuple(one) for one in tokens]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_verification_and_drafts_are_replayed_too(
    demo_path: Path, start_rank: Start, count: int
) -> None:
    """Sequences with fewer drafts than the bucket has rows get fillers, which change nothing."""
    executor = start_rank(
        demo_path,
        quantization="none",
        speculative_algorithm="mtp",
        speculative_num_draft_tokens=4,
    )
    want = draft_steps(executor, count, most=3)
    buckets = [Bucket(size, q) for size in (1, 2, 4) for q in (1, 4)]
    graphs = capture(executor, *buckets, PromptBucket(32, 5))
    assert draft_steps(executor, count, most=3) == want
    assert graphs.num_replays > 5 * 2, "five verifications, and passes of the draft"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_prompts_are_replayed_in_full_buckets_and_in_padded_ones(
    demo_path: Path, start_rank: Start, serve: Serve, count: int, chunk_tokens: int
) -> None:
    """Chunks and decodes in one step; what they leave goes to the spare page."""
    executor = start_rank(demo_path, quantization="none")
    want = serve(executor, prompts(count), num_new=5, chunk_tokens=chunk_tokens)
    graphs = capture(executor, PromptBucket(4, 5), PromptBucket(16, 5))
    steps = executor.num_steps
    assert serve(executor, prompts(count), num_new=5, chunk_tokens=chunk_tokens) == want
    assert graphs.num_replays == executor.num_steps - steps


def test_what_no_bucket_holds_runs_as_it_is(
    demo_path: Path, start_rank: Start, serve: Serve
) -> None:
    executor = start_rank(demo_path, quantization="none")
    want = serve(executor, prompts(3), num_new=4, chunk_tokens=64)
    graphs = capture(executor, Bucket(2, 1))
    assert serve(executor, prompts(3), num_new=4, chunk_tokens=64) == want
    assert graphs.num_replays == 2, "the first has one step alone, and one with the second"


def test_nothing_is_replayed_while_the_graphs_memory_is_released(
    demo_path: Path, start_rank: Start, serve: Serve
) -> None:
    executor, arena = start_rank(demo_path, quantization="none"), HostArena()
    want = serve(executor, prompts(2), num_new=4, chunk_tokens=64)
    graphs = capture(executor, Bucket(2, 1), arena=arena)
    arena.keep()
    arena.release()
    assert serve(executor, prompts(2), num_new=4, chunk_tokens=64) == want
    assert graphs.num_replays == 0
    arena.resume()
    assert serve(executor, prompts(2), num_new=4, chunk_tokens=64) == want
    assert graphs.num_replays == 4


def test_capture_is_told_of_and_goes_from_the_largest_to_the_smallest(
    demo_path: Path, start_rank: Start
) -> None:
    executor, bar = start_rank(demo_path, speculative_algorithm="mtp"), Bar()
    graphs = capture(executor, Bucket(1, 1), Bucket(4, 1), Bucket(2, 1), progress=bar)
    assert graphs.buckets == (Bucket(4, 1), Bucket(2, 1), Bucket(1, 1))
    assert bar.told == [("capturing graphs", 6, "graphs"), 1, 1, 1, 1, 1, 1]


def test_a_tensor_that_moved_is_named(demo_path: Path, start_rank: Start) -> None:
    executor = start_rank(demo_path)
    graphs = capture(executor, Bucket(1, 1))
    graphs.check()
    norm = executor._model.hf.base_model.get_submodule("norm")
    theirs = norm.get_parameter("weight")
    norm.register_parameter("weight", nn.Parameter(theirs.detach().clone(), requires_grad=False))
    with pytest.raises(AddressChanged, match=r"model\.norm\.weight, which moved"):
        graphs.check()
    norm.register_parameter("weight", theirs)
    graphs.check()
    layer = next(iter(executor._model.experts))
    table = executor._model.experts[layer].weights
    name = next(iter(table))
    table._tensors[name] = table[name].clone()
    with pytest.raises(AddressChanged, match=name):
        graphs.check()
