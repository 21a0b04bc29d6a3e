# SPDX-License-Identifier: Apache-2.0
"""Small plans, and a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.config.plan import Plan, TokenBudget
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Phase, SampleSpec, SeqChunk, Step
from tetrarch.executor.weights import WeightStore
from tetrarch.memory.slots import SlotTable
from tetrarch.models.build import Forward

# Eight pages to a chunk, 64 in all: a few dozen tokens meet every border.
SMALL: dict[str, dict[str, Any]] = {
    "model": {"context_len": 64},
    "experts": {
        "budget": TokenBudget(per_rank=40, rows=40, term="a chunk of 32 and 8 decodes"),
    },
    "memory": {"page_size": 4, "max_total_tokens": 256},
    "schedule": {"max_running_requests": 8, "max_prefill_tokens": 32, "chunk_tokens": 32},
}


class HistoryModel:
    """Writes token ids where keys go, and predicts from what it reads back through the pages.

    Its draft writes the id of the following token at every position, and says what the model will
    say, if it finds all of them. The hidden state of a position is its number, and the draft's
    own that of the token it was given, below zero.
    """

    vocab_size, page_size = 97, 4

    def __init__(self) -> None:
        self.sites = tuple(
            AttentionSite(
                index=index,
                name=name,
                num_heads=1,
                num_kv_heads=1,
                key_dim=1,
                value_dim=1,
                latent=False,
            )
            for index, name in enumerate(("attn", "draft"))
        )
        self.hf = torch.nn.Identity()
        self.weights, self.scratch = SlotTable(), SlotTable()
        self.experts: dict[str, Any] = {}
        self.dtype = torch.float32
        self.broken = False
        self.forwards: list[int] = []
        self.draft_forwards: list[int] = []

    @staticmethod
    def next_token(history: Sequence[int]) -> int:
        """A polynomial of all tokens, so that none can be missed."""
        value = 1
        for token in history:
            value = (value * 31 + token + 1) % 1_000_003
        return value % HistoryModel.vocab_size

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
        *,
        wants_hidden: bool = False,
    ) -> Forward:
        self.forwards.append(len(token_ids))
        pool.key(0).view(-1)[attn.write_at] = token_ids.float()
        logits = torch.zeros(len(logits_at), self.vocab_size)
        for i, row in enumerate(logits_at.tolist()):
            history = self._read(pool.key(0), attn, row, int(positions[row]) + 1)
            logits[i, self.next_token(history)] = 1.0
        hidden = positions[:, None].float() if wants_hidden else None
        return Forward(logits * torch.nan if self.broken else logits, hidden)

    def draft_forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
    ) -> Forward:
        self.draft_forwards.append(len(token_ids))
        pool.key(1).view(-1)[attn.write_at] = token_ids.float()
        logits = torch.zeros(len(logits_at), self.vocab_size)
        for i, row in enumerate(logits_at.tolist()):
            before = self._read(pool.key(1), attn, row, int(positions[row]))
            follows_a_guess = hidden[row] < 0
            assert hidden[row] == (-1 - before[-1] if follows_a_guess else positions[row])
            history = [*self._read(pool.key(0), attn, row, 1), *before, int(token_ids[row])]
            logits[i, self.next_token(history)] = 1.0
        return Forward(logits, -1 - token_ids[:, None].float())

    def _read(self, keys: Tensor, attn: AttentionInputs, row: int, count: int) -> list[int]:
        seq = int(torch.searchsorted(attn.cu_seqlens_q, row, right=True)) - 1
        pages, size = attn.page_table[seq].tolist(), self.page_size
        at = [pages[p // size] * size + p % size for p in range(count)]
        return [int(token) for token in keys.view(-1)[at].tolist()]


@pytest.fixture
def history_model(monkeypatch: pytest.MonkeyPatch) -> HistoryModel:
    """The model of whatever executor is made."""
    model = HistoryModel()
    room = "tetrarch.executor.executor."
    monkeypatch.setattr(room + "build_model", lambda plan, **_: model)
    monkeypatch.setattr(WeightStore, "load", lambda *_: SimpleNamespace())
    return model


@pytest.fixture
def executor(history_model: HistoryModel, make_plan: Callable[..., Plan]) -> Executor:
    """Over the model that knows its history."""
    return Executor(make_plan())


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
                    samples=(_GREEDY,) if end == len(tokens[row]) else (),
                )
            )
        for seq, result in zip(seqs, executor.step(_step(seqs)).seqs, strict=True):
            done[seq.row] += len(seq.token_ids)
            tokens[seq.row] += result.token_ids
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def _step(seqs: Sequence[SeqChunk]) -> Step:
    num_tokens = sum(len(seq.token_ids) for seq in seqs)
    return Step(phase=Phase.PREFILL, seqs=tuple(seqs), rank_tokens=(num_tokens,))
