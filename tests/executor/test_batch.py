# SPDX-License-Identifier: Apache-2.0
"""The layout of a batch against a slow reading of its definition."""

from __future__ import annotations

import random

import pytest
import torch

from tetrarch.config.plan import TokenBudget
from tetrarch.core.errors import CapacityExceeded
from tetrarch.executor.batch import ForwardBatch, build_batch
from tetrarch.executor.rows import RowMemory
from tetrarch.executor.step import FUTURE, Phase, PromptScoring, SampleSpec, SeqChunk, Step

PAGE = 4
CPU = torch.device("cpu")
BUDGET = TokenBudget(per_rank=64, rows=64, term="decode: 64 requests x 1 token")


def step_of(*seqs: SeqChunk) -> Step:
    num_tokens = sum(len(seq.token_ids) for seq in seqs)
    return Step(phase=Phase.PREFILL, seqs=seqs, rank_tokens=(num_tokens, 3))


def build(*seqs: SeqChunk) -> ForwardBatch:
    return build_batch(step_of(*seqs), page_size=PAGE, budget=BUDGET, memory=RowMemory(16, CPU))


def random_seqs(seed: int) -> list[SeqChunk]:
    """Decodes, first chunks and later chunks over scattered pages."""
    rng = random.Random(seed)
    free = rng.sample(range(500), 500)
    seqs: list[SeqChunk] = []
    for row in range(rng.randint(1, 9)):
        start = rng.choice([0, 0, 1, 3, 4, 17, 30])
        length = 1 if rng.random() < 0.5 else rng.randint(1, 7)
        pages = tuple(free.pop() for _ in range(-(-(start + length) // PAGE)))
        seqs.append(
            SeqChunk(
                row=row,
                token_ids=tuple(rng.choices(range(1000), k=length)),
                start=start,
                pages=pages,
                samples=(SampleSpec(),) * rng.randint(0, length),
                scoring=rng.choice([None, PromptScoring(first=0, targets=(5,) * length)]),
            )
        )
    return seqs


@pytest.mark.parametrize("seed", range(30))
def test_every_token_gets_its_position_and_its_slot(seed: int) -> None:
    seqs = random_seqs(seed)
    batch = build(*seqs)
    tokens = [(seq, i) for seq in seqs for i in range(len(seq.token_ids))]
    positions = [seq.start + i for seq, i in tokens]
    assert batch.num_tokens == len(tokens)
    assert batch.token_ids.tolist() == [seq.token_ids[i] for seq, i in tokens]
    assert batch.positions.tolist() == positions
    assert batch.attn.write_at.tolist() == [
        seq.pages[p // PAGE] * PAGE + p % PAGE
        for (seq, _), p in zip(tokens, positions, strict=True)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_gets_its_lengths_and_its_pages(seed: int) -> None:
    seqs = random_seqs(seed)
    attn = build(*seqs).attn
    q_lens = [len(seq.token_ids) for seq in seqs]
    ends = [seq.start + q for seq, q in zip(seqs, q_lens, strict=True)]
    assert attn.cu_seqlens_q.tolist() == [sum(q_lens[:i]) for i in range(len(seqs) + 1)]
    assert attn.kv_lens.tolist() == ends
    assert (attn.q_lens, attn.kv_lens_host) == (tuple(q_lens), tuple(ends))
    longest = max(len(seq.pages) for seq in seqs)
    assert attn.page_table.tolist() == [
        [*seq.pages, *[0] * (longest - len(seq.pages))] for seq in seqs
    ]


def test_logits_come_from_sampled_rows_first_then_from_scored_ones() -> None:
    chunk = {"pages": (0, 1), "start": 0}
    batch = build(
        SeqChunk(row=0, token_ids=(1, 2, 3), **chunk),
        SeqChunk(
            row=1,
            token_ids=(1, 2, 3, 4),
            samples=(SampleSpec(),),
            scoring=PromptScoring(first=1, targets=(3, 4)),
            **chunk,
        ),
        SeqChunk(row=2, token_ids=(9,), samples=(SampleSpec(),), **chunk),
        SeqChunk(
            row=3,
            token_ids=(1, 2),
            scoring=PromptScoring(first=0, targets=(2, 7)),
            **chunk,
        ),
    )
    assert batch.logits_at.tolist() == [6, 7, 4, 5, 8, 9]


def test_dtypes_are_what_the_model_and_the_kernels_read() -> None:
    batch = build(*random_seqs(0))
    attn = batch.attn
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.logits_at)} == {torch.int64}
    assert attn.write_at.dtype == torch.int64
    assert {t.dtype for t in (attn.cu_seqlens_q, attn.kv_lens, attn.page_table)} == {torch.int32}
    assert batch.rank_tokens == (batch.num_tokens, 3)


def test_a_step_beyond_the_budget_is_refused_with_the_term() -> None:
    long = SeqChunk(row=0, token_ids=(0,) * 65, start=0, pages=tuple(range(17)))
    with pytest.raises(CapacityExceeded, match="65 tokens, buffers for 64") as caught:
        build(long)
    assert BUDGET.term in caught.value.why


def test_a_sequence_with_too_few_pages_is_refused() -> None:
    """Without the check its last token would overwrite page 0, which belongs to another one."""
    short = SeqChunk(row=7, token_ids=(1, 2), start=3, pages=(9,))
    other = SeqChunk(row=1, token_ids=(1,), start=4, pages=(2, 3))
    with pytest.raises(CapacityExceeded, match="row 7 needs 2 pages and holds 1"):
        build(other, short)


def test_a_future_token_is_the_last_one_of_its_row() -> None:
    memory = RowMemory(4, CPU)
    memory.note_drawn(torch.tensor([3, 0, 2, 1]), torch.tensor([73, -1, 72, 71]))
    seqs = [
        SeqChunk(row=2, token_ids=(FUTURE,), start=1, pages=(0,)),
        SeqChunk(row=1, token_ids=(1, 2, 3), start=0, pages=(1,)),
        SeqChunk(row=3, token_ids=(5, FUTURE), start=0, pages=(2,)),
        SeqChunk(row=0, token_ids=(FUTURE,), start=2, pages=(3,)),
    ]
    batch = build_batch(step_of(*seqs), page_size=PAGE, budget=BUDGET, memory=memory)
    assert batch.token_ids.tolist() == [72, 1, 2, 3, 5, 73, 0], "a broken one is any valid id"
    assert memory.last_ids.tolist() == [0, 71, 72, 73]


def test_rows_that_draw_are_listed_in_the_order_of_their_draws() -> None:
    chunk = {"token_ids": (1, 2), "start": 0, "pages": (0,)}
    spec = SampleSpec()
    batch = build(
        SeqChunk(row=5, samples=(spec,), **chunk),
        SeqChunk(row=1, **chunk),
        SeqChunk(row=3, samples=(spec, spec), **chunk),
    )
    assert batch.drawn.tolist() == [5, 3, 3]
