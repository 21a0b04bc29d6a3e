# SPDX-License-Identifier: Apache-2.0
"""Any batch in a bucket that holds it: real rows in order, fillers in front, the rest repeated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tetrarch.config.plan import GraphPlan, Plan, SpecPlan
from tetrarch.executor.buckets import (
    Bucket,
    PromptBucket,
    buckets_of,
    choose_bucket,
    lay_out,
    pages_per_seq,
)

BUCKETS = [Bucket(size, q) for size in (1, 2, 4, 8) for q in (1, 4)]


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "bucket"),
    [
        ([1], [1], Bucket(1, 1)),
        ([1, 1, 1], [9, 9, 9], Bucket(4, 1)),
        ([4], [4], Bucket(1, 4)),
        ([2, 1], [9, 4], Bucket(2, 4)),
        ([2, 1], [9, 3], PromptBucket(8, 3)),  # no room for three fillers before position 2
        ([5], [9], PromptBucket(8, 3)),
        ([1] * 9, [9] * 9, None),
        ([], [], None),
        ([1, 5], [1, 9], PromptBucket(8, 3)),
        ([3, 3, 3], [3, 3, 3], None),  # no sequence is left to fill it
        ([4, 4], [3, 9], PromptBucket(8, 3)),  # full
        ([9], [9], None),
    ],
)
def test_the_smallest_that_holds_the_batch(
    q_lens: list[int], kv_lens: list[int], bucket: Bucket | None
) -> None:
    assert choose_bucket([*BUCKETS, PromptBucket(8, 3)], q_lens, kv_lens) == bucket


@pytest.mark.parametrize("seed", range(20))
def test_every_row_finds_its_place(seed: int) -> None:
    rng = random.Random(seed)
    bucket = rng.choice(BUCKETS)
    count = rng.randint(1, bucket.num_seqs)
    q_lens = [rng.randint(1, bucket.q_len) for _ in range(count)]
    kv_lens = [rng.randint(bucket.q_len, 50) for _ in range(count)]
    layout = lay_out(bucket, q_lens, kv_lens)
    position = [kv - q + i for q, kv in zip(q_lens, kv_lens, strict=True) for i in range(q)]
    own = [row for row, spare in enumerate(layout.is_spare) if not spare]
    assert list(layout.row_of) == own
    assert [layout.source[row] for row in own] == list(range(sum(q_lens)))
    assert layout.is_even == all(q == bucket.q_len for q in q_lens)
    for row in range(bucket.num_rows):
        seq = layout.seqs[row // bucket.q_len]
        if row // bucket.q_len >= count:
            assert kv_lens[seq] == min(kv_lens), "the shortest one is repeated"
        at = position[layout.source[row]] - layout.back[row]
        # Rows of a sequence end at its last position, one after the other.
        assert at == kv_lens[seq] - bucket.q_len + row % bucket.q_len >= 0


def test_a_plan_captures_the_fields_usual_sizes(make_plan: Callable[..., Plan]) -> None:
    assert GraphPlan(0, 0).decode_batches == ()
    assert GraphPlan(1, 0).decode_batches == (1,)
    assert GraphPlan(20, 0).decode_batches == (1, 2, 4, 8, 16, 20)
    large = GraphPlan(300, 0).decode_batches
    assert large[:5] == (1, 2, 4, 8, 16)
    assert large[-5:] == (248, 256, 272, 288, 300)
    plan = replace(make_plan(), graphs=GraphPlan(2, 0))
    assert buckets_of(plan) == (Bucket(1, 1), Bucket(2, 1))
    drafted = replace(plan, spec=SpecPlan("mtp", 3, 4))
    assert buckets_of(drafted) == (Bucket(1, 1), Bucket(2, 1), Bucket(1, 4), Bucket(2, 4))
    prompts = replace(plan, graphs=GraphPlan(0, 600))
    assert GraphPlan(0, 600).prefill_sizes == (32, 64, 128, 256, 512, 600)
    assert buckets_of(prompts)[-1] == PromptBucket(600, plan.schedule.max_running_requests + 1)
    assert pages_per_seq(prompts) * plan.memory.page_size >= 600
    assert pages_per_seq(drafted) * plan.memory.page_size >= plan.model.context_len + 4
