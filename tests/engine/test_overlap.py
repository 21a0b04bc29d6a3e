# SPDX-License-Identifier: Apache-2.0
"""Steps launched before the last one's results are read: who ends, fails, or leaves meanwhile.

The executor of these tests computes a step when it is waited for, and refuses a write into a page
that has changed hands since the launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.actions import Continue, Pause, Release, Resume, SetVersion
from tetrarch.engine.messages import Abort, Flush
from tetrarch.engine.scheduler import Scheduler
from tetrarch.executor.step import FUTURE

Make = Callable[..., Any]
PROMPT = tuple(range(20, 33))
NAN = 511


@pytest.fixture
def bench(make_bench: Make) -> Any:
    return make_bench(overlap=True)


def rows_of(bench: Any) -> list[dict[int, tuple[int, ...]]]:
    """Per step: what each row computes."""
    return [{seq.row: seq.token_ids for seq in step.seqs} for step in bench.executor.steps]


def ending_at(bench: Any, index: int) -> tuple[int, ...]:
    """Return what the prompt yields up to the first token that no earlier one equals."""
    tokens = bench.expected(bench.add("free", PROMPT, max_new_tokens=20))
    bench.hear(bench.engine.abort(Abort(rid="free")))
    assert tokens[index] not in tokens[:index]
    return tokens[: index + 1]


def test_a_step_is_launched_before_the_last_one_is_read(bench: Any) -> None:
    request = bench.add("a", PROMPT, max_new_tokens=4)
    bench.step()
    assert len(bench.executor.steps) == 2
    assert len(bench.tokens("a")) == 1
    assert rows_of(bench)[1] == {0: (FUTURE,)}
    bench.run()
    assert bench.tokens("a") == bench.expected(request)


def test_who_ends_at_a_known_length_has_no_row_too_many(make_bench: Make) -> None:
    bench = make_bench(overlap=True, chunk=64)
    for rid, count in (("a", 1), ("b", 5), ("c", 0)):
        bench.add(rid, [ord(rid), *PROMPT], max_new_tokens=count)
    bench.run()
    rows = sum(len(step.seqs) for step in bench.executor.steps)
    assert rows == 1 + 5 + 1
    bench.check_pages()


def test_who_ends_at_a_token_has_one_row_too_many_which_is_dropped(bench: Any) -> None:
    tokens = ending_at(bench, 4)
    bench.add("a", PROMPT, max_new_tokens=20, stop_token_ids=tokens[-1:])
    bench.step(5)
    assert bench.tokens("a") == tokens
    assert bench.last("a").finish.matched == tokens[-1]
    assert (bench.engine.num_running, bench.engine.has_work) == (0, True)
    assert bench.engine.heartbeat().num_used_tokens > 0, "out of reach until the step is through"
    bench.step()
    assert len(bench.executor.steps) == 6
    assert not bench.engine.has_work
    assert bench.engine.counters["generation_tokens_total"] == 5
    bench.check_pages()


def test_pages_that_are_given_away_too_early_are_noticed(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the parking, the stale row writes into pages of somebody else."""
    stop = Scheduler._stop

    def hasty(self: Scheduler, seq: Any) -> None:
        flying, self._flying = self._flying, deque()
        stop(self, seq)
        self._flying = flying

    monkeypatch.setattr(Scheduler, "_stop", hasty)
    tokens = ending_at(bench, 4)
    bench.add("a", PROMPT, max_new_tokens=20, stop_token_ids=tokens[-1:])
    with pytest.raises(AssertionError, match="somebody else's page"):
        bench.run()


def test_an_abort_drops_what_is_in_flight_and_nobody_elses(bench: Any) -> None:
    first = bench.add("a", PROMPT, max_new_tokens=20)
    other = bench.add("b", PROMPT[3:], max_new_tokens=20)
    bench.step(4)
    bench.hear(bench.engine.abort(Abort(rid="a")))
    told = bench.tokens("a")
    bench.run()
    assert bench.tokens("a") == told == bench.expected(first)[: len(told)]
    assert bench.tokens("b") == bench.expected(other)
    bench.check_pages()


def test_an_id_that_is_used_again_does_not_get_the_token_of_its_first_bearer(bench: Any) -> None:
    bench.add("a", PROMPT, max_new_tokens=20)
    bench.step(3)
    bench.hear(bench.engine.abort(Abort(rid="a")))
    bench.deltas.clear()
    request = bench.add("a", PROMPT[::-1], max_new_tokens=6)
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    bench.check_pages()


def test_everybody_may_leave_while_a_prompt_is_in_flight(bench: Any) -> None:
    bench.add("a", range(100, 140), max_new_tokens=5)  # three chunks
    bench.step()
    bench.hear(bench.engine.abort(Abort(everything=True)))
    assert bench.engine.has_work
    bench.run()
    bench.check_pages()


def test_logits_that_are_not_finite_end_one_request_and_spoil_no_page(bench: Any) -> None:
    bad = bench.add("bad", (*PROMPT, NAN), max_new_tokens=9)
    good = bench.add("good", PROMPT, max_new_tokens=9)
    bench.run()
    assert bench.last(bad.rid).finish.code == "nan_logits"
    assert bench.tokens("good") == bench.expected(good)
    assert bench.last("good").finish.kind == "length"
    bench.check_pages()


def test_a_prompt_in_flight_is_not_computed_twice(bench: Any) -> None:
    """Who shares it waits until it is known, two steps and not one."""
    prompt = list(range(100, 112))
    requests = [bench.add(rid, [*prompt, ord(rid)], max_new_tokens=2) for rid in "abcd"]
    bench.run()
    assert [bench.last(rid).num_cached for rid in "abcd"] == [0, 12, 12, 12]
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)


@pytest.mark.parametrize("penalty", ["presence", "frequency", "repetition"])
def test_penalties_wait_for_the_tokens_they_read(make_bench: Make, penalty: str) -> None:
    benches = [make_bench(overlap=overlap) for overlap in (False, True)]
    value = 1.3 if penalty == "repetition" else 0.5
    for bench in benches:
        bench.add("a", PROMPT, max_new_tokens=12, **{f"{penalty}_penalty": value})
        bench.run()
    assert benches[0].tokens("a") == benches[1].tokens("a")
    assert all(FUTURE not in step.seqs[0].token_ids for step in benches[1].executor.steps)


def test_end_tokens_are_banned_ahead(bench: Any) -> None:
    tokens = ending_at(bench, 1)
    request = bench.add("a", PROMPT, max_new_tokens=9, min_new_tokens=4, stop_token_ids=tokens[-1:])
    bench.run()
    assert bench.tokens("a") == bench.expected(request)
    specs = [spec for step in bench.executor.steps for seq in step.seqs for spec in seq.samples]
    assert all(bool(spec.banned_ids) == (spec.position < 4) for spec in specs)


def test_nobody_is_set_back_for_pages_that_an_end_gives_free(make_bench: Make) -> None:
    """Both fit to their last token; with a row too many each, they would not."""
    bench = make_bench(overlap=True, pages=12, page_size=2, context=12, running=2)
    requests = [bench.add(rid, [ord(rid)] * 5, max_new_tokens=7) for rid in "ab"]
    bench.run()
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)
    assert bench.engine.counters["num_retracted_reqs"] == 0
    bench.check_pages()


def test_who_is_alone_may_have_every_page(make_bench: Make) -> None:
    """Those of a request that has just ended are not free yet when the next one looks."""
    bench = make_bench(overlap=True, pages=4, page_size=4, context=16, running=2, cache=False)
    tokens = ending_at(bench, 1)
    for rid in "abc":
        bench.add(rid, PROMPT, max_new_tokens=3, stop_token_ids=tokens[-1:])
    bench.run()
    assert [bench.tokens(rid) for rid in "abc"] == [tokens] * 3
    bench.check_pages()


# Control messages, through the loop: everything in flight is told before they act.


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_finds_nothing_in_flight(bench: Any, desk: Any, mode: str) -> None:
    desk.send(desk.request("a"))
    desk.turn(2)
    assert desk.ask(Pause, mode=mode).ok
    told = desk.tokens("a")
    assert not bench.executor.flying
    assert len(told) == len(bench.executor.steps), "and all of it is told"
    assert desk.ask(Continue).ok
    desk.run()
    want = bench.expected(desk.request("a"))
    assert desk.tokens("a") == (told if mode == "abort" else want)
    bench.check_pages()


def test_a_version_begins_with_the_first_token_after_it(bench: Any, desk: Any) -> None:
    """What was in flight has been drawn by the old weights."""
    desk.send(desk.request("a"))
    desk.turn(2)
    assert desk.ask(SetVersion, version="new", abort_all_requests=False).ok
    drawn = 4  # three turns have told of one each, and the fourth was in flight
    desk.run()
    spans = [(one.version, one.start, one.end) for one in desk.deltas("a")[-1].versions]
    assert spans == [("default", 0, drawn), ("new", drawn, 12)]


def test_memory_is_not_released_under_a_step_in_flight(bench: Any, desk: Any) -> None:
    """The last delta has been told, and a stale row still runs."""
    tokens = ending_at(bench, 4)
    bench.add("a", PROMPT, max_new_tokens=20, stop_token_ids=tokens[-1:])
    bench.step(5)
    assert bench.executor.flying
    assert desk.ask(Release, tags=("kv_cache",)).ok
    assert not bench.executor.flying
    assert desk.ask(Resume, tags=("kv_cache",)).ok
    desk.send(desk.request("b"))
    desk.run()
    assert desk.tokens("b") == bench.expected(desk.request("b"))


def test_a_flush_right_after_the_last_delta_is_not_refused(bench: Any, desk: Any) -> None:
    tokens = ending_at(bench, 4)
    bench.add("a", PROMPT, max_new_tokens=20, stop_token_ids=tokens[-1:])
    bench.step(5)
    assert bench.executor.flying
    assert desk.ask(Flush, timeout=0.0).ok


def test_a_client_that_leaves_is_forgotten_between_two_steps(bench: Any, desk: Any) -> None:
    desk.send(desk.request("a"), desk.request("b"))
    desk.turn(2)
    desk.send(Abort(rid="a", quiet=True))
    count = len(desk.tokens("a"))
    desk.run()
    assert len(desk.tokens("a")) == count
    assert desk.tokens("b") == bench.expected(desk.request("b"))
    bench.check_pages()
