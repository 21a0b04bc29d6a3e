# SPDX-License-Identifier: Apache-2.0
"""Whole requests over an executor whose tokens depend on every page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.messages import Abort
from tetrarch.engine.text import Tokenizer

Make = Callable[..., Any]
NAN = 511  # the fake executor's logits are not finite where it computes this token


def finish(bench: Any, rid: str) -> Any:
    return bench.last(rid).finish


def test_a_request_yields_what_it_would_alone(make_bench: Make) -> None:
    bench = make_bench()
    requests = [bench.add(f"r{i}", range(3, 9 + i), max_new_tokens=10 + i) for i in range(6)]
    bench.run()
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)
        assert finish(bench, request.rid).kind == "length"
        assert finish(bench, request.rid).length == request.sampling.max_new_tokens


def test_a_stop_id_ends_the_output_and_is_part_of_it(make_bench: Make) -> None:
    bench = make_bench()
    free = bench.expected(bench.add("free", range(3, 9), max_new_tokens=12))
    bench.add("stopped", range(3, 9), max_new_tokens=12, stop_token_ids=(free[4],))
    bench.run()
    assert bench.tokens("stopped") == free[:5]
    assert (finish(bench, "stopped").kind, finish(bench, "stopped").matched) == ("stop", free[4])


def test_the_models_end_token_ends_unless_ignored(
    make_bench: Make, demo_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = make_bench()
    tokens = free.expected(free.add("free", range(3, 9), max_new_tokens=12))
    monkeypatch.setattr(Tokenizer, "eos_ids", frozenset({tokens[3]}))
    bench = make_bench(tokenizer=demo_tokenizer)
    bench.add("ends", range(3, 9), max_new_tokens=12)
    bench.add("goes on", range(3, 9), max_new_tokens=12, ignore_eos=True)
    bench.add("held", range(3, 9), max_new_tokens=12, min_new_tokens=12)
    bench.run()
    assert bench.tokens("ends") == tokens[:4]
    assert bench.tokens("goes on") == tokens
    assert tokens[3] not in bench.tokens("held")


def test_no_limit_runs_up_to_the_context(make_bench: Make) -> None:
    bench = make_bench(context=32)
    bench.add("open", range(10), max_new_tokens=None)
    bench.add("huge", range(10), max_new_tokens=10**9)
    bench.run()
    assert len(bench.tokens("open")) == len(bench.tokens("huge")) == 22
    assert finish(bench, "open").kind == "length"


def test_no_tokens_means_scoring_only(
    make_bench: Make, prompt_scores: Callable[[Sequence[int], int], Any]
) -> None:
    bench = make_bench(context=40)
    prompt = list(range(100, 140))  # the whole context
    bench.add("score", prompt, max_new_tokens=0, return_logprobs=True, logprob_start=0)
    bench.add("bare", prompt[:20], max_new_tokens=0)
    bench.run()
    (delta,) = bench.deltas["score"]
    assert list(delta.prompt_logprobs) == prompt_scores(prompt, 0)
    assert delta.token_ids == ()
    assert (delta.finish.kind, delta.finish.length) == ("length", 0)
    assert finish(bench, "bare").kind == "length"


def test_a_request_whose_logits_are_not_finite_ends_alone(make_bench: Make) -> None:
    bench = make_bench()
    good = bench.add("good", range(3, 9), max_new_tokens=10)
    bench.add("bad", [*range(100, 118), NAN, 5, 6], max_new_tokens=10)
    bench.run()
    end = finish(bench, "bad")
    assert (end.kind, end.status, end.code) == ("abort", 500, "nan_logits")
    assert bench.tokens("good") == bench.expected(good)
    bench.add("later", [*range(100, 118), 9], max_new_tokens=1)
    bench.run()
    assert bench.last("later").num_cached == 0, "its pages may hold what is not finite"
    bench.check_pages()


def test_an_abort_is_exact(make_bench: Make) -> None:
    bench = make_bench()
    for rid in ("a", "ab", "abc"):
        bench.add(rid, range(3, 9), max_new_tokens=20)
    bench.step(3)
    (ended,) = bench.engine.abort(Abort(rid="a"))
    assert (ended.rid, ended.finish.kind, ended.finish.status) == ("a", "abort", None)
    assert bench.engine.abort(Abort(rid="unknown")) == []
    assert bench.engine.abort(Abort(rid="", prefix=True)) == []
    assert {delta.rid for delta in bench.engine.abort(Abort(rid="ab", prefix=True))} == {
        "ab",
        "abc",
    }
    bench.check_pages()


def test_an_abort_works_in_every_state(make_bench: Make) -> None:
    bench = make_bench(running=2, chunk=8)
    bench.add("running", range(3, 9), max_new_tokens=20)
    bench.step(2)
    bench.add("partial", range(100, 140))
    bench.add("waiting", range(5))
    bench.step()
    assert [len(bench.tokens(rid)) for rid in ("running", "partial")] == [3, 0]
    ended = bench.engine.abort(Abort(everything=True))
    assert {delta.rid for delta in ended} == {"running", "partial", "waiting"}
    assert not bench.engine.has_work
    assert bench.engine.counters["num_aborted_requests_total"] == 3
    bench.check_pages()


def test_a_request_larger_than_the_pool_ends_there_and_harms_nobody(make_bench: Make) -> None:
    bench = make_bench(pages=8, page_size=4)
    requests = [bench.add(rid, [ord(rid)] * 20, max_new_tokens=100) for rid in "ab"]
    bench.run()
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)
        assert len(bench.tokens(request.rid)) == 12


def test_a_live_id_is_refused_and_free_again_afterwards(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", [3], max_new_tokens=2)
    with pytest.raises(RequestError, match="in use") as caught:
        bench.add("a", [4])
    assert caught.value.param == "rid"
    bench.run()
    bench.deltas.clear()
    bench.add("a", [4])
    bench.run()
    assert finish(bench, "a").kind == "length"


def test_a_flush_waits_for_nobody(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", range(100, 120))
    bench.step()
    assert not bench.engine.flush()
    bench.run()
    assert bench.engine.heartbeat().num_cached_tokens > 0
    assert bench.engine.flush()
    assert bench.engine.heartbeat().num_cached_tokens == 0
    bench.add("b", range(100, 120))
    bench.run()
    assert bench.last("b").num_cached == 0


def test_counters_leave_probes_out(make_bench: Make) -> None:
    bench = make_bench()
    for rid, is_probe in (("a", False), ("b", False), ("probe", True)):
        bench.add(rid, range(100, 110), max_new_tokens=3, is_probe=is_probe)
        bench.run()
    counters = bench.engine.counters
    assert counters["num_requests_total"] == 2
    assert counters["prompt_tokens_total"] == 20
    assert counters["cached_tokens_total"] == 8
    assert counters["generation_tokens_total"] == 6
    assert counters["steps"] == len(bench.executor.steps)
    assert counters["moe_tokens_high_water"] == 10
    assert counters["moe_buffer_capacity_tokens"] == bench.plan.experts.budget.rows
    snapshot = bench.engine.snapshot()
    assert snapshot["counters"] == counters
    assert snapshot["num_free_tokens"] + snapshot["num_cached_tokens"] == 256
