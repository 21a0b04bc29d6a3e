# SPDX-License-Identifier: Apache-2.0
"""The smoke steps cover the extremes and stay within every limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tetrarch.config.plan import Plan, SpecPlan, TokenBudget
from tetrarch.executor.capacity import Capacity
from tetrarch.executor.smoke import smoke_steps
from tetrarch.executor.step import DraftWork, Phase

MakePlan = Callable[..., Plan]
ROOM = Capacity(num_pages=1000, page_size=4)


def budget(per_rank: int) -> dict[str, Any]:
    return {"budget": TokenBudget(per_rank=per_rank, rows=per_rank, term="test")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_token_the_widest_decode_and_the_longest_prefill(
    make_plan: MakePlan, device: str
) -> None:
    plan = make_plan(experts=budget(150), device={"torch_device": device})
    one, wide, long = smoke_steps(plan, ROOM)
    assert (one.phase, one.num_tokens) == (Phase.DECODE, 1)
    assert (wide.phase, [len(seq.token_ids) for seq in wide.seqs]) == (Phase.DECODE, [1] * 8)
    assert (long.phase, [len(seq.token_ids) for seq in long.seqs]) == (Phase.PREFILL, [64, 64, 22])


def test_speculation_adds_the_widest_verification_and_work_for_the_draft(
    make_plan: MakePlan,
) -> None:
    plan = make_plan(experts=budget(30))
    assert all(seq.draft is None for step in smoke_steps(plan, ROOM) for seq in step.seqs)
    adapts = SpecPlan("mtp", 3, 4, adaptive=True)
    steps = smoke_steps(replace(plan, spec=adapts), ROOM)
    assert [step.num_tokens for step in steps] == [1, 8, 30, 28]
    wide = steps[-1]
    assert wide.phase is Phase.VERIFY
    assert [(len(seq.token_ids), len(seq.samples)) for seq in wide.seqs] == [(4, 4)] * 7
    for step in steps:
        for seq in step.seqs:
            assert seq.draft == DraftWork(next_id=None, num_drafts=3)
            assert len(seq.pages) * 4 >= len(seq.token_ids) + 2, "the draft's own slots"


def test_a_gpus_steps_ask_for_all_that_takes_memory(make_plan: MakePlan) -> None:
    plan = make_plan(experts=budget(150), device={"torch_device": "cuda"})
    _, wide, long = smoke_steps(plan, ROOM)
    [spec] = {seq.samples[0] for seq in wide.seqs}
    assert (spec.temperature, spec.top_p < 1, spec.top_logprobs > 0) == (1, True, True)
    assert [len(seq.scoring.targets) for seq in long.seqs if seq.scoring] == [63, 63, 21]
    assert not any(seq.scoring for seq in smoke_steps(make_plan(), ROOM)[2].seqs)


def test_a_cpu_is_not_kept_busy_by_a_huge_budget(make_plan: MakePlan) -> None:
    slow = smoke_steps(make_plan(experts=budget(16384)), ROOM)[2]
    full = smoke_steps(make_plan(experts=budget(2048), device={"torch_device": "cuda"}), ROOM)[2]
    assert (slow.num_tokens, full.num_tokens) == (1024, 2048)


def test_no_page_is_shared_and_none_is_beyond_the_pool(make_plan: MakePlan) -> None:
    small = Capacity(num_pages=20, page_size=4)
    for step in smoke_steps(make_plan(experts=budget(400)), small):
        pages = [page for seq in step.seqs for page in seq.pages]
        assert len(set(pages)) == len(pages)
        assert max(pages) < 20
        assert all(len(seq.pages) * 4 >= len(seq.token_ids) for seq in step.seqs)


def test_no_step_reads_a_key_that_it_did_not_write(make_plan: MakePlan) -> None:
    """A fresh pool holds anything, NaN included; such a read would fail a healthy model."""
    steps = smoke_steps(make_plan(), ROOM)
    assert all(seq.start == 0 for step in steps for seq in step.seqs)
