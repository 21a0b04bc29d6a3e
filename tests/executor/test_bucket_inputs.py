# SPDX-License-Identifier: Apache-2.0
"""What a captured forward finds in its tensors once a batch is in them."""

from __future__ import annotations

import numpy as np
import torch

from tetrarch.core.specs import TensorSpec
from tetrarch.executor.batch import page_table, place
from tetrarch.executor.bucket_inputs import BucketInputs, Rows, SparePage
from tetrarch.executor.buckets import Bucket, PromptBucket
from tetrarch.memory.slots import SlotTable

CPU = torch.device("cpu")
PAGE, SPARE = 4, 9
LARGEST = Bucket(4, 3)
PROMPTS = PromptBucket(8, 3)


def inputs() -> BucketInputs:
    return BucketInputs(
        [LARGEST, Bucket(2, 3), Bucket(1, 3), PROMPTS],
        pages_per_seq=5,
        hidden=TensorSpec((2,), torch.float32, CPU),
        spare=SparePage(SPARE, PAGE),
        slots=SlotTable(),
        device=CPU,
    )


def rows(q_lens: list[int], kv_lens: list[int], logits_at: list[int]) -> Rows:
    """A batch whose token ids are 100 and up, row by row."""
    starts = np.array(kv_lens) - np.array(q_lens)
    table = page_table([[2 * row, 2 * row + 1] for row in range(len(q_lens))])
    positions, attn = place(table, starts=starts, q_lens=q_lens, page_size=PAGE, device=CPU)
    count = sum(q_lens)
    return Rows(
        token_ids=torch.arange(100, 100 + count),
        positions=positions,
        attn=attn,
        logits_at=torch.tensor(logits_at),
        hidden=torch.arange(2.0 * count).view(count, 2),
    )


def test_a_full_bucket_is_the_batch() -> None:
    mine, bucket = inputs(), Bucket(2, 3)
    batch = rows([3, 3], [5, 7], [2, 5])
    assert mine.fill(bucket, batch, num_logits=6) is None
    got = mine.rows(bucket, num_logits=6)
    assert torch.equal(got.token_ids, batch.token_ids)
    assert torch.equal(got.positions, batch.positions)
    assert torch.equal(got.attn.write_at, batch.attn.write_at)
    assert torch.equal(got.attn.kv_lens, batch.attn.kv_lens)
    assert torch.equal(got.attn.cu_seqlens_q, batch.attn.cu_seqlens_q)
    assert torch.equal(got.attn.page_table[:, :2], batch.attn.page_table)
    assert got.logits_at.tolist() == [2, 5, 0, 0, 0, 0]
    assert got.hidden is not None
    assert batch.hidden is not None
    assert torch.equal(got.hidden, batch.hidden)


def test_fillers_and_repetitions_write_to_the_spare_page_alone() -> None:
    """Sequence 0 brings two rows of three; 2 and 3 repeat sequence 0, the shortest."""
    mine, bucket = inputs(), LARGEST
    mine.fill_idle(bucket)
    batch = rows([2, 3], [6, 8], [1, 4])
    row_of = mine.fill(bucket, batch, num_logits=12)
    assert row_of is not None
    assert row_of.tolist() == [1, 2, 3, 4, 5]
    got = mine.rows(bucket, num_logits=12)
    own = [100, 100, 101]
    assert got.token_ids.tolist() == [*own, 102, 103, 104, *own, *own]
    assert got.positions.tolist() == [3, 4, 5, 5, 6, 7, 3, 4, 5, 3, 4, 5]
    page = got.attn.write_at // PAGE
    assert page.tolist() == [SPARE, 1, 1, 3, 3, 3, *[SPARE] * 6]
    assert got.attn.kv_lens.tolist() == [6, 8, 6, 6]
    assert got.attn.kv_lens_host == (6, 8, 6, 6)
    assert got.attn.page_table[:, :2].tolist() == [[0, 1], [2, 3], [0, 1], [0, 1]]
    assert got.attn.cu_seqlens_q.tolist() == [0, 3, 6, 9, 12]
    assert got.logits_at.tolist() == [2, 5, *[0] * 10]
    assert got.hidden is not None
    assert got.hidden[:, 0].tolist() == [0, 0, 2, 4, 6, 8, 0, 0, 2, 0, 0, 2]


def test_a_smaller_batch_leaves_no_index_of_a_larger_one() -> None:
    mine = inputs()
    for bucket, count in ((LARGEST, 4), (Bucket(1, 3), 1)):
        batch = rows([3] * count, [8] * count, list(range(3 * count)))
        mine.fill(bucket, batch, num_logits=bucket.num_rows)
    small = rows([3], [8], [2])
    mine.fill(Bucket(1, 3), small, num_logits=3)
    assert mine.rows(Bucket(1, 3), num_logits=3).logits_at.tolist() == [2, 0, 0]


def test_idle_sequences_live_in_the_spare_page() -> None:
    mine = inputs()
    mine.fill_idle(Bucket(2, 3))
    got = mine.rows(Bucket(2, 3), num_logits=6)
    assert (got.attn.write_at // PAGE == SPARE).all()
    assert (got.attn.page_table == SPARE).all()
    assert got.positions.tolist() == [0] * 6
    assert got.attn.kv_lens.tolist() == [3, 3]


def test_one_more_prompt_takes_the_rows_that_prompts_leave() -> None:
    mine = inputs()
    mine.fill_idle(PROMPTS)
    idle = mine.rows(PROMPTS, num_logits=3)
    assert idle.attn.q_lens == idle.attn.kv_lens_host == (1, 7), "a short one and a long one"
    assert idle.attn.cu_seqlens_q.tolist() == [0, 1, 8, 8]
    assert idle.positions.tolist() == [0] * 8
    batch = rows([2, 3], [6, 8], [1, 4])
    assert mine.fill(PROMPTS, batch, num_logits=3) is None
    got = mine.rows(PROMPTS, num_logits=3)
    assert got.token_ids.tolist() == [100, 101, 102, 103, 104, *[104] * 3]
    assert got.positions.tolist() == [4, 5, 5, 6, 7, 0, 0, 0]
    assert (got.attn.write_at // PAGE).tolist() == [1, 1, 3, 3, 3, *[SPARE] * 3]
    assert got.attn.cu_seqlens_q.tolist() == [0, 2, 5, 8]
    assert got.attn.kv_lens.tolist() == [6, 8, 3]
    assert (got.attn.page_table[2] == SPARE).all()
    assert (got.attn.q_lens, got.attn.kv_lens_host) == ((2, 3, 3), (6, 8, 3))
    assert got.logits_at.tolist() == [1, 4, 0]


def test_prompts_that_leave_no_row_have_no_company() -> None:
    mine = inputs()
    mine.fill_idle(PROMPTS)
    mine.fill(PROMPTS, rows([8], [8], [7]), num_logits=3)
    got = mine.rows(PROMPTS, num_logits=3)
    assert got.attn.cu_seqlens_q.tolist() == [0, 8, 8, 8]
    assert got.attn.kv_lens.tolist() == [8, 0, 0]
    assert got.attn.q_lens == (8,)
