# SPDX-License-Identifier: Apache-2.0
"""Drafts change how fast a request runs, and nothing else; the counters are exact.

`test_scheduler.py` runs any traffic with drafts; what is here looks at one thing each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.acceptance import Acceptance
from tetrarch.engine.messages import Abort
from tetrarch.engine.text import Tokenizer
from tetrarch.executor.step import Phase

Make = Callable[..., Any]
NAN = 511  # computing this token makes logits that are not finite
PROMPT = range(4, 10)


def sizes(bench: Any) -> list[list[int]]:
    return [[len(seq.token_ids) for seq in step.seqs] for step in bench.executor.steps]


def accepted(bench: Any, rid: str) -> Acceptance:
    return bench.last(rid).acceptance


def test_a_draft_that_is_always_right_reports_exactly_its_maximum(make_bench: Make) -> None:
    bench = make_bench(steps=3)
    request = bench.add("a", PROMPT, max_new_tokens=13)  # one of the prompt, then 3 x 4
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    assert sizes(bench) == [[6], [4], [4], [4]]
    assert [step.phase for step in bench.executor.steps][1:] == [Phase.VERIFY] * 3
    counts = accepted(bench, "a")
    assert (counts.length, counts.rate) == (4.0, 1.0)
    assert counts == Acceptance(
        num_verifies=3, num_tokens=12, num_proposed=9, num_accepted=9, histogram=[0, 0, 0, 3]
    )


def test_a_draft_that_is_never_right_costs_rows_and_no_token(
    make_bench: Make, make_draft: Make
) -> None:
    bench = make_bench(steps=3, draft=make_draft(0))
    request = bench.add("a", PROMPT, max_new_tokens=13)
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    counts = accepted(bench, "a")
    assert (counts.length, counts.rate, counts.histogram) == (1.0, 0.0, [counts.num_verifies])
    assert sizes(bench) == [[6], *[[4]] * 9, [3], [2], [1]]


@pytest.mark.parametrize("right", [1, 2])
def test_drafts_count_up_to_the_first_wrong_one(
    make_bench: Make, make_draft: Make, right: int
) -> None:
    bench = make_bench(steps=3, draft=make_draft(right))
    request = bench.add("a", PROMPT, max_new_tokens=40)
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    counts = accepted(bench, "a")
    assert counts.length == pytest.approx(right + 1, abs=0.2)  # the end needs no whole run
    assert max(range(4), key=[*counts.histogram, 0, 0, 0].__getitem__) == right


def test_no_more_is_drafted_than_the_output_has_room_for(make_bench: Make) -> None:
    bench = make_bench(steps=3)
    for rid, most in (("none", 0), ("one", 1), ("two", 2), ("three", 3)):
        bench.add(rid, PROMPT, max_new_tokens=most)
        bench.run()
    works = [step.seqs[0].draft for step in bench.executor.steps]
    assert [work and work.num_drafts for work in works] == [None, None, None, None, 1, None]
    assert sizes(bench)[-2:] == [[2], [2]], "the prefix of the prompt was known; one draft"


def test_a_prompt_is_read_along_chunk_by_chunk(make_bench: Make) -> None:
    bench = make_bench(steps=3, chunk=8)
    bench.add("a", range(100, 120), max_new_tokens=9)
    bench.run()
    works = [step.seqs[0].draft for step in bench.executor.steps]
    assert [(work.next_id, work.num_drafts) for work in works[:3]] == [
        (108, 0),
        (116, 0),
        (None, 3),
    ]


def test_who_drafts_and_who_does_not_share_a_step(make_bench: Make) -> None:
    bench = make_bench(steps=3, chunk=16)
    requests = [
        bench.add("long", PROMPT, max_new_tokens=30),
        bench.add("short", range(50, 55), max_new_tokens=2),
    ]
    bench.step()
    requests.append(bench.add("late", range(100, 140), max_new_tokens=5))
    bench.run()
    assert [4, 1, 16] in sizes(bench)
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)


def test_a_stop_id_inside_an_accepted_run_ends_there_and_trims_the_counters(
    make_bench: Make,
) -> None:
    free = make_bench()
    tokens = free.expected(free.add("free", PROMPT, max_new_tokens=12))
    assert tokens[6] not in tokens[:6]
    bench = make_bench(steps=3)
    bench.add("a", PROMPT, max_new_tokens=12, stop_token_ids=(tokens[6],), return_logprobs=True)
    bench.run()
    assert bench.tokens("a") == tokens[:7]
    assert sum(len(delta.logprobs) for delta in bench.deltas["a"]) == 7
    counts = accepted(bench, "a")
    assert counts == Acceptance(  # 1 of the prompt, 4 of a whole run, 2 of one that is cut
        num_verifies=2, num_tokens=6, num_proposed=5, num_accepted=5, histogram=[0, 0, 1, 1]
    )
    assert bench.engine.counters["generation_tokens_total"] == 7
    bench.check_pages()


@pytest.mark.parametrize("key", ["stop", "stop_regex"])
def test_a_stop_string_inside_an_accepted_run_ends_at_the_same_token(
    make_bench: Make, demo_tokenizer: Tokenizer, key: str
) -> None:
    plain, fast = (make_bench(tokenizer=demo_tokenizer, steps=steps) for steps in (0, 5))
    tokens = plain.expected(plain.add("free", PROMPT, max_new_tokens=20, ignore_eos=True))
    text = demo_tokenizer.decode(tokens[8:10])
    for bench in (plain, fast):
        bench.add("a", PROMPT, max_new_tokens=20, ignore_eos=True, **{key: (text,)})
        bench.run()
    assert fast.tokens("a") == plain.tokens("a") == tokens[: len(plain.tokens("a"))]
    assert len(plain.tokens("a")) % 6 != 1, "not where a run ends anyway"
    assert fast.last("a").finish == plain.last("a").finish
    assert fast.last("a").finish.kind == "stop"


@pytest.mark.parametrize("at", range(9))  # twice every place in a run of four
def test_why_an_output_ends_does_not_depend_on_where_in_a_run(make_bench: Make, at: int) -> None:
    """The last accepted draft is the one after which nothing is left to compute."""
    plain, fast = (make_bench(steps=steps) for steps in (0, 3))
    tokens = plain.expected(plain.add("free", PROMPT, max_new_tokens=12))
    for bench in (plain, fast):
        bench.add("a", PROMPT, max_new_tokens=12, stop_token_ids=(tokens[at],))
        bench.run()
    assert fast.tokens("a") == plain.tokens("a")
    assert fast.last("a").finish == plain.last("a").finish
    assert fast.last("a").finish.kind == "stop"
    assert fast.last("a").finish.matched == tokens[at]


def test_end_tokens_are_banned_row_by_row(make_bench: Make) -> None:
    free = make_bench()
    tokens = free.expected(free.add("free", PROMPT, max_new_tokens=12))
    bench = make_bench(steps=3)
    request = bench.add(
        "a", PROMPT, max_new_tokens=12, min_new_tokens=3, stop_token_ids=(tokens[1], tokens[7])
    )
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    for step in bench.executor.steps:
        for spec in step.seqs[0].samples:
            assert bool(spec.banned_ids) == (spec.position < 3)


def test_penalties_see_the_drafts_before_them(make_bench: Make) -> None:
    bench = make_bench(steps=3)
    request = bench.add("a", PROMPT, max_new_tokens=20, presence_penalty=0.5)
    bench.run()
    tokens = bench.tokens("a")
    assert tokens == bench.expected(request)
    for step in bench.executor.steps:
        for spec in step.seqs[0].samples:
            assert spec.output_ids == tokens[: spec.position]


def test_few_pages_mean_few_drafts_and_nobody_is_set_back_for_one(make_bench: Make) -> None:
    """Two requests fill the pool exactly, page for page, and take turns at its end."""
    for steps in (0, 5):
        bench = make_bench(steps=steps, pages=12, page_size=2, context=12, running=2)
        requests = [bench.add(rid, [ord(rid)] * 5, max_new_tokens=7) for rid in "ab"]
        bench.run()
        for request in requests:
            assert bench.tokens(request.rid) == bench.expected(request)
        assert bench.engine.counters["num_retracted_reqs"] == 0
        bench.check_pages()


def test_pages_of_drafts_are_given_back_when_the_step_has_run(make_bench: Make) -> None:
    bench = make_bench(steps=5, page_size=1)
    bench.add("a", PROMPT, max_new_tokens=30)
    bench.step()
    assert len(bench.executor.steps[0].seqs[0].pages) == 6 + 4
    assert bench.engine.heartbeat().num_used_tokens == 6
    bench.step()
    assert len(bench.executor.steps[1].seqs[0].pages) == 6 + 1 + 5 + 4
    assert bench.engine.heartbeat().num_used_tokens == 6 + 1 + 5


def test_a_lone_request_reaches_the_end_of_the_pool(make_bench: Make) -> None:
    bench = make_bench(steps=5, pages=8, page_size=2, context=16)
    request = bench.add("a", PROMPT, max_new_tokens=None)
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    assert len(bench.tokens("a")) == 10
    assert bench.engine.counters["num_retracted_reqs"] == 0


def test_drafts_are_dropped_by_who_loses_its_pages(make_bench: Make) -> None:
    bench = make_bench(steps=3)
    request = bench.add("a", PROMPT, max_new_tokens=13)
    bench.step(2)
    bench.engine.renew()
    bench.run()
    assert sizes(bench) == [[6], [4], [11], [4], [3]], "no draft behind what is computed again"
    assert bench.tokens("a") == bench.expected(request)


def test_drafts_of_old_weights_are_proposals_like_any_other(make_bench: Make) -> None:
    """Weights that are replaced in place, between a proposal and its verification."""
    bench = make_bench(steps=3)
    request = bench.add("a", PROMPT, max_new_tokens=13)
    bench.step(2)
    bench.engine.weight_version = "new"
    assert len(bench.engine._live["a"].seq.drafts) == 3
    bench.engine._live["a"].seq.drafts = (1, 2, 3)
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    spans = [(span.version, span.start, span.end) for span in bench.last("a").versions]
    assert spans == [("default", 0, 5), ("new", 5, 13)]


def test_logits_that_are_not_finite_behind_a_draft_do_not_end_a_request(
    make_bench: Make, make_draft: Make
) -> None:
    """The draft is wrong, and NaN hides nowhere: the rows before it are not finite either."""
    bench = make_bench(steps=3, draft=make_draft(1, nan_rate=1.0))
    request = bench.add("a", PROMPT, max_new_tokens=13, return_logprobs=True)
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    assert bench.last("a").finish.kind == "length"
    assert bench.last("a").num_retractions == 1
    assert sizes(bench)[1:3] == [[4], [7]], "from clean pages, and without drafts from then on"
    assert all(step.seqs[0].draft is None for step in bench.executor.steps[2:])


def test_what_is_aborted_keeps_its_counts(make_bench: Make) -> None:
    bench = make_bench(steps=3)
    bench.add("a", PROMPT, max_new_tokens=40)
    bench.step(3)
    (ended,) = bench.engine.abort(Abort(rid="a"))
    assert ended.acceptance.num_tokens == 8
    bench.check_pages()


def test_a_flush_starts_the_counters_anew_and_not_those_of_the_lifetime(
    make_bench: Make,
) -> None:
    bench = make_bench(steps=3)
    for rid, is_probe in (("a", False), ("probe", True)):
        bench.add(rid, PROMPT, max_new_tokens=9, is_probe=is_probe)
        bench.run()
    spec = bench.engine.heartbeat().spec
    assert (spec.num_steps, spec.lifetime.length) == (3, 4.0)
    assert spec.lifetime == spec.since_flush
    assert spec.lifetime.num_verifies == 2, "a probe is not traffic"
    assert bench.engine.flush()
    spec = bench.engine.heartbeat().spec
    assert (spec.lifetime.num_verifies, spec.since_flush.num_verifies) == (2, 0)
    assert (spec.since_flush.length, spec.since_flush.rate) == (0.0, 0.0)


def test_without_speculation_there_is_nothing_to_report(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", PROMPT)
    bench.run()
    assert bench.last("a").acceptance is None
    assert bench.engine.heartbeat().spec is None
