# SPDX-License-Identifier: Apache-2.0
"""Where an output ends, and what its client hears when."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine import patterns
from tetrarch.engine.messages import Abort
from tetrarch.engine.request import WeightSpan
from tetrarch.engine.text import Tokenizer

Make = Callable[..., Any]


def finish(bench: Any, rid: str) -> Any:
    return bench.last(rid).finish


def test_an_end_on_the_last_allowed_token_is_a_stop(make_bench: Make) -> None:
    bench = make_bench()
    free = bench.expected(bench.add("free", range(3, 9), max_new_tokens=5))
    bench.add("stopped", range(3, 9), max_new_tokens=5, stop_token_ids=(free[4],))
    bench.run()
    assert finish(bench, "free").kind == "length"
    assert finish(bench, "stopped").kind == "stop"


def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(
    make_bench: Make, demo_tokenizer: Tokenizer
) -> None:
    bench = make_bench(tokenizer=demo_tokenizer)
    free = bench.expected(bench.add("free", range(300, 306), max_new_tokens=30))
    text = demo_tokenizer.decode(free[:12])
    stop = text[-3:]
    at = next(n for n in range(1, 31) if stop in demo_tokenizer.decode(free[:n]))
    bench.add("stopped", range(300, 306), max_new_tokens=30, stop=(stop, "never there"))
    late = at + 1
    bench.add("late", range(300, 306), max_new_tokens=30, stop=(stop,), min_new_tokens=late)
    bench.run()
    assert bench.tokens("stopped") == free[:at]
    assert finish(bench, "stopped").matched == stop
    assert len(bench.tokens("late")) > at


def test_a_pattern_ends_the_output_at_the_token_that_completes_it(
    make_bench: Make, demo_tokenizer: Tokenizer
) -> None:
    bench = make_bench(tokenizer=demo_tokenizer)
    free = bench.expected(bench.add("free", range(300, 306), max_new_tokens=30))
    pattern = re.escape(demo_tokenizer.decode(free[:12])[-3:]) + "|never there"
    at = next(
        n for n in range(1, 31) if re.search(pattern, demo_tokenizer.decode(free[:n])) is not None
    )
    bench.add("stopped", range(300, 306), max_new_tokens=30, stop_regex=(pattern,))
    bench.run()
    assert bench.tokens("stopped") == free[:at]
    assert finish(bench, "stopped").matched == pattern


def test_a_pattern_that_is_too_slow_ends_its_own_output_as_an_error(
    make_bench: Make, demo_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_BURST_S", 1e-6)
    slow = r"(?=([^\x00]+)+\x00)"
    bench = make_bench(tokenizer=demo_tokenizer)
    bench.add("slow", range(300, 306), max_new_tokens=40, stop_regex=(slow,))
    bench.add("other", range(300, 306), max_new_tokens=40)
    bench.run()
    ended = finish(bench, "slow")
    assert (ended.kind, ended.status, ended.param) == ("abort", 400, "stop_regex")
    assert ended.code == "stop_regex_too_slow"
    assert finish(bench, "other").kind == "length"


def test_an_abort_brings_what_was_not_told_yet(make_bench: Make) -> None:
    bench = make_bench()
    request = bench.add("a", range(3, 9), max_new_tokens=20, stream_interval=100)
    bench.step(6)
    assert len(bench.tokens("a")) == 1, "the first token does not wait"
    bench.hear(bench.engine.abort(Abort(rid="a")))
    assert bench.tokens("a") == bench.expected(request)[:6]


def test_deltas_gather_the_tokens_of_an_interval(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", range(3, 9), max_new_tokens=12, stream_interval=4, return_logprobs=True)
    bench.run()
    assert [len(delta.token_ids) for delta in bench.deltas["a"]] == [1, 4, 4, 3]
    assert [len(delta.logprobs) for delta in bench.deltas["a"]] == [1, 4, 4, 3]
    for delta in bench.deltas["a"]:
        said = [entry.token_id for entry in delta.logprobs]
        assert said == list(delta.token_ids)


def test_versions_of_the_weights_are_told_in_spans(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", range(3, 9), max_new_tokens=6)
    bench.step(2)
    bench.engine.weight_version = "new"
    bench.run()
    assert bench.last("a").versions == (WeightSpan("default", 0, 2), WeightSpan("new", 2, 6))


def test_times_are_told_in_order(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", range(3, 9))
    bench.run()
    times = bench.last("a").times
    assert list(times) == ["received", "scheduled", "first_token", "finished"]
    assert list(times.values()) == sorted(times.values())
