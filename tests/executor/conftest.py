# SPDX-License-Identifier: Apache-2.0
"""Small plans, and a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tetrarch.config.plan import Plan, TokenBudget
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Phase, SampleSpec, SeqChunk, Step

# Eight pages to a chunk, 64 in all: a few dozen tokens meet every border.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"context_len": 64},
    "experts": {
        "budget": TokenBudget(per_rank=40, rows=40, term="a chunk of 32 and 8 decodes"),
    },
    "memory": {"page_size": 4, "max_total_tokens": 256},
    "schedule": {"max_running_requests": 8, "max_prefill_tokens": 32, "chunk_tokens": 32},
}


@pytest.fixture(scope="session")
def make_plan(make_plan: Callable[..., Plan], demo_path: Path) -> Callable[..., Plan]:
    """Return a factory of small plans: `make_plan(memory={"page_size": 8})`."""

    def make(**parts: dict[str, Any]) -> Plan:
        merged = {part: SMALL.get(part, {}) | parts.get(part, {}) for part in SMALL | parts}
        return make_plan(demo_path, **merged)

    return make


@pytest.fixture(scope="session")
def start(start_rank: Callable[..., Executor]) -> Callable[..., Executor]:
    """Return `start(checkpoint, **settings)`: a small executor, of larger pages."""
    return partial(start_rank, page_size=8, max_total_tokens=256)


@pytest.fixture(scope="session")
def serve() -> Callable[..., list[list[int]]]:
    """Return `serve(executor, prompts, num_new=, chunk_tokens=)` → the new tokens of each."""
    return _serve


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


_GREEDY = SampleSpec(temperature=0.0)


def _serve(
    executor: Executor, prompts: Sequence[Sequence[int]], *, num_new: int, chunk_tokens: int
) -> list[list[int]]:
    """Serve prompts the way a scheduler would: one chunk of a prompt and all decodes a step.

    Pages are handed out one by one in a shuffled order, so that no sequence's are contiguous.
    """
    size = executor.capacity.page_size
    free = list(range(executor.capacity.num_pages))
    random.Random(len(prompts)).shuffle(free)
    pages: list[list[int]] = [[] for _ in prompts]
    tokens = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)  # tokens in the pool
    while any(len(t) < len(p) + num_new for t, p in zip(tokens, prompts, strict=True)):
        seqs: list[SeqChunk] = []
        filling = False
        for row, prompt in enumerate(prompts):
            if len(tokens[row]) == len(prompt) + num_new:
                continue
            if done[row] < len(prompt):
                if filling:
                    continue
                filling = True
            end = min(len(tokens[row]), done[row] + chunk_tokens)
            while len(pages[row]) * size < end:
                pages[row].append(free.pop())
            seqs.append(
                SeqChunk(
                    row=row,
                    token_ids=tuple(tokens[row][done[row] : end]),
                    start=done[row],
                    pages=tuple(pages[row]),
                    sample=_GREEDY if end == len(tokens[row]) else None,
                )
            )
        for seq, result in zip(seqs, executor.step(_step(seqs)).seqs, strict=True):
            done[seq.row] += len(seq.token_ids)
            tokens[seq.row] += result.token_ids
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def _step(seqs: Sequence[SeqChunk]) -> Step:
    num_tokens = sum(len(seq.token_ids) for seq in seqs)
    return Step(phase=Phase.PREFILL, seqs=tuple(seqs), rank_tokens=(num_tokens,))
