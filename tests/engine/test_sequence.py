# SPDX-License-Identifier: Apache-2.0
"""What a sequence asks the executor for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Make = Callable[..., Any]


def test_end_tokens_are_banned_until_the_minimum(make_bench: Make) -> None:
    bench = make_bench()
    free = bench.expected(bench.add("free", range(3, 9), max_new_tokens=12))
    request = bench.add(
        "late", range(3, 9), max_new_tokens=12, min_new_tokens=7, stop_token_ids=(free[4],)
    )
    bench.run()
    tokens = bench.tokens("late")
    assert tokens == bench.expected(request)
    assert free[4] not in tokens[:7]
    assert len(tokens) >= 7
    specs = [step.seqs[-1].samples[0] for step in bench.executor.steps if len(step.seqs) == 2]
    assert [bool(spec.banned_ids) for spec in specs] == [spec.position < 7 for spec in specs]


@pytest.mark.parametrize("start", [0, 1, 5, 17, 37, 38])
def test_prompt_logprobs_are_exact_whatever_the_cache_holds(
    make_bench: Make, prompt_scores: Callable[[Sequence[int], int], Any], start: int
) -> None:
    bench = make_bench(chunk=8)
    prompt = list(range(100, 138))
    bench.add("warm", prompt, max_new_tokens=1)
    bench.run()
    bench.add("scored", prompt, max_new_tokens=2, return_logprobs=True, logprob_start=start)
    bench.run()
    first, second = bench.deltas["scored"]
    assert list(first.prompt_logprobs) == prompt_scores(prompt, start)
    assert second.prompt_logprobs == ()
    assert len(first.logprobs) == len(second.logprobs) == 1
    assert first.num_cached == (max(0, start - 1) if start < 38 else 37) // 4 * 4


def test_each_request_draws_its_own_seed_and_keeps_it(make_bench: Make) -> None:
    bench = make_bench()
    for rid in ("a", "b"):
        bench.add(rid, range(3, 9), temperature=1.0, max_new_tokens=12)
    for rid in ("c", "d"):
        bench.add(rid, range(3, 9), temperature=1.0, max_new_tokens=12, sampling_seed=5)
    bench.run()
    assert bench.tokens("a") != bench.tokens("b")
    assert bench.tokens("c") == bench.tokens("d")
    seeds = {seq.samples[0].seed for step in bench.executor.steps for seq in step.seqs}
    assert len(seeds) == 3
    assert bench.executor.steps[-1].seqs[0].samples[0].position == 11


def test_penalties_see_the_history_and_others_do_not_carry_it(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("plain", range(3, 6), max_new_tokens=4)
    bench.add("repeats", range(3, 6), max_new_tokens=4, repetition_penalty=1.2)
    bench.add("counts", range(3, 6), max_new_tokens=4, frequency_penalty=0.2)
    bench.run()
    plain, repeats, counts = (seq.samples[0] for seq in bench.executor.steps[-1].seqs)
    assert (plain.prompt_ids, plain.output_ids) == ((), ())
    assert repeats.prompt_ids == tuple(range(3, 6))
    assert repeats.output_ids == bench.tokens("repeats")[:3]
    assert (counts.prompt_ids, counts.output_ids) == ((), bench.tokens("counts")[:3])
