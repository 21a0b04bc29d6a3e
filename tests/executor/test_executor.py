# SPDX-License-Identifier: Apache-2.0
"""The executor, around a model whose every token depends on the whole history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tetrarch.config.plan import Plan
from tetrarch.core.errors import CapacityExceeded, CheckpointError, ConfigError
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import FUTURE, Pending, Phase, SampleSpec, SeqChunk, Step
from tetrarch.memory.slots import Region

MakePlan = Callable[..., Plan]
Serve = Callable[..., list[list[int]]]
GREEDY = SampleSpec(temperature=0.0)


def chunk(row: int, history: Sequence[int], *, start: int, pages: Sequence[int]) -> SeqChunk:
    """All tokens of `history` from `start` on; the last one samples."""
    return SeqChunk(
        row=row,
        token_ids=tuple(history[start:]),
        start=start,
        pages=tuple(pages),
        samples=(GREEDY,),
    )


def step_of(*seqs: SeqChunk) -> Step:
    num_tokens = sum(len(seq.token_ids) for seq in seqs)
    return Step(phase=Phase.PREFILL, seqs=seqs, rank_tokens=(num_tokens,))


PROMPTS = [[5, 3, 8], list(range(40, 61)), [9], [7] * 13]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 32])
def test_chunks_mixed_with_decodes_see_the_whole_history(
    executor: Executor, history_model: Any, serve: Serve, chunk_tokens: int
) -> None:
    expected: list[list[int]] = []
    for prompt in PROMPTS:
        history = list(prompt)
        for _ in range(9):
            history.append(history_model.next_token(history))
        expected.append(history[len(prompt) :])
    assert serve(executor, PROMPTS, num_new=9, chunk_tokens=chunk_tokens) == expected


def test_a_stale_key_changes_the_tokens(executor: Executor, history_model: Any) -> None:
    """Negative control: the same step over a page that another sequence wrote."""
    history = [5, 3, 8, 1, 2]
    executor.step(step_of(chunk(0, history[:4], start=0, pages=[3])))
    right = executor.step(step_of(chunk(0, history, start=4, pages=[3, 4])))
    assert right.seqs[0].token_ids == (history_model.next_token(history),)
    executor.step(step_of(chunk(1, [5, 3, 9, 1], start=0, pages=[3])))
    stale = executor.step(step_of(chunk(0, history, start=4, pages=[3, 4])))
    assert stale.seqs[0].token_ids == (history_model.next_token([5, 3, 9, 1, 2]),)
    assert stale != right


def launch_all(
    executor: Executor, *, prompts: Sequence[Sequence[int]], num_new: int
) -> list[Pending]:
    """Launch a prefill and the decodes behind it, and wait for none: no token is known."""
    launched: list[Pending] = []
    for length in range(num_new):
        chunks = [
            SeqChunk(
                row=row,
                token_ids=(FUTURE,) if length else tuple(prompt),
                start=len(prompt) + length - 1 if length else 0,
                pages=tuple(range(8 * row, 8 * row + 8)),
                samples=(GREEDY,),
            )
            for row, prompt in enumerate(prompts)
        ]
        launched.append(executor.launch(step_of(*chunks)))
    return launched


def test_a_step_goes_on_from_tokens_that_nobody_has_read(
    executor: Executor, history_model: Any
) -> None:
    launched = launch_all(executor, prompts=PROMPTS[:3], num_new=5)
    histories = [list(prompt) for prompt in PROMPTS[:3]]
    for pending in launched:
        for history, result in zip(histories, pending.wait().seqs, strict=True):
            history.append(history_model.next_token(history))
            assert result.token_ids == (history[-1],)


def test_behind_a_broken_row_comes_a_token_that_can_be_read(
    executor: Executor, history_model: Any
) -> None:
    """Its result is of no use, but the ids of a batch index a table."""
    history_model.broken = True
    broken, stale = launch_all(executor, prompts=[[5, 3, 8]], num_new=2)
    assert broken.wait().seqs[0].failed
    assert stale.wait().seqs[0].failed
    history_model.broken = False
    (chunk_after,) = launch_all(executor, prompts=[[5, 3, 8]], num_new=1)
    assert chunk_after.wait().seqs[0].token_ids == (history_model.next_token([5, 3, 8]),)
    assert executor._rows.last_ids.min() >= 0


def test_an_idle_step_runs_nothing(executor: Executor, history_model: Any) -> None:
    before = len(history_model.forwards)
    result = executor.step(Step(phase=Phase.IDLE, seqs=(), rank_tokens=(0,)))
    assert (result.seqs, len(history_model.forwards)) == ((), before)
    assert (executor.num_steps, executor.moe_tokens_high_water) == (0, 0)


def test_smallest_and_largest_forwards_run_before_the_executor_is_ready(
    executor: Executor, history_model: Any
) -> None:
    """One token, 8 running requests, the whole budget of 40; none of them is counted."""
    assert history_model.forwards == [1, 8, 40]
    assert executor.num_steps == 0


def test_logits_that_are_not_finite_stop_the_start(history_model: Any, make_plan: MakePlan) -> None:
    history_model.broken = True
    with pytest.raises(CheckpointError, match="not finite"):
        Executor(make_plan())


def test_a_step_beyond_the_budget_computes_nothing(executor: Executor, history_model: Any) -> None:
    before = len(history_model.forwards)
    with pytest.raises(CapacityExceeded, match="41 tokens, buffers for 40"):
        executor.step(step_of(chunk(0, [1] * 41, start=0, pages=range(11))))
    assert (len(history_model.forwards), executor.num_steps) == (before, 0)


def test_counters_keep_the_largest_step(executor: Executor) -> None:
    for length in (3, 17, 5):
        executor.step(step_of(chunk(0, [1] * length, start=0, pages=range(5))))
    assert (executor.num_steps, executor.moe_tokens_high_water) == (3, 17)


def test_memory_is_reported_by_region(executor: Executor) -> None:
    """256 tokens of two layers' keys and values in FP32."""
    assert executor.memory == {Region.WEIGHTS: 0, Region.KV_CACHE: 256 * 16, "scratch": 0}
    assert executor.capacity.max_total_tokens == 256


@pytest.mark.usefixtures("history_model")
def test_a_pool_below_one_context_stops_the_start(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="one context"):
        Executor(make_plan(memory={"max_total_tokens": 60}))
