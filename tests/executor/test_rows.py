# SPDX-License-Identifier: Apache-2.0
"""A page table that is kept from step to step is the one that would be made anew."""

from __future__ import annotations

import random

import numpy as np
import torch

from tetrarch.executor.batch import page_table
from tetrarch.executor.rows import RowMemory
from tetrarch.executor.step import SeqChunk

CPU = torch.device("cpu")


def test_pages_of_sequences_that_grow_shrink_come_and_go() -> None:
    rng, memory = random.Random(0), RowMemory(8, CPU)
    pages: dict[int, tuple[int, ...]] = {}
    for _ in range(300):
        row = rng.randrange(8)
        match rng.randrange(4):
            case 0:
                pages[row] = tuple(rng.choices(range(1, 99), k=rng.randrange(1, 40)))
            case 1:
                pages[row] = (*pages.get(row, ()), rng.randrange(1, 99))
            case 2:
                pages[row] = pages.get(row, ())[: rng.randrange(1, 40)]
            case _:
                pages.pop(row, None)
        rows = rng.sample(sorted(pages), k=rng.randrange(len(pages) + 1))
        seqs = [SeqChunk(row=row, token_ids=(1,), start=0, pages=pages[row]) for row in rows]
        table = memory.page_table(seqs)
        assert table.dtype == np.int32
        assert np.array_equal(table, page_table([pages[row] for row in rows]))


def test_a_table_that_was_given_out_does_not_change() -> None:
    """What a step in flight reads is no business of the next one."""
    memory = RowMemory(2, CPU)
    first = memory.page_table([SeqChunk(row=0, token_ids=(1,), start=0, pages=(4, 5))])
    memory.page_table([SeqChunk(row=0, token_ids=(1,), start=0, pages=(6, 7))])
    assert first.tolist() == [[4, 5]]
