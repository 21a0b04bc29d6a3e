# SPDX-License-Identifier: Apache-2.0
"""Who runs when: budgets, pages, retraction, order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine import holdings
from tetrarch.engine.messages import Abort
from tetrarch.executor.step import Phase

Make = Callable[..., Any]
NAN = 511  # the logits of whoever has this token in its prompt are not finite


def sizes(bench: Any) -> list[list[int]]:
    return [[len(seq.token_ids) for seq in step.seqs] for step in bench.executor.steps]


def test_a_long_prompt_is_cut_and_decodes_ride_along(make_bench: Make) -> None:
    bench = make_bench(chunk=16)
    bench.add("a", range(10, 14), max_new_tokens=20)
    bench.step(2)
    bench.add("b", range(100, 140), max_new_tokens=1)
    bench.step(3)
    assert sizes(bench) == [[4], [1], [1, 16], [1, 16], [1, 8]]
    assert [step.phase for step in bench.executor.steps[:3]] == [
        Phase.PREFILL,
        Phase.DECODE,
        Phase.PREFILL,
    ]


def test_without_mixing_prompts_and_decodes_take_turns(make_bench: Make) -> None:
    bench = make_bench(chunk=16, mixed=False)
    bench.add("a", range(10, 14), max_new_tokens=20)
    bench.step()
    bench.add("b", range(100, 140), max_new_tokens=1)
    bench.step(6)
    assert sizes(bench) == [[4], [1], [16], [1], [16], [1], [8]]


def test_uncut_prompts_share_a_step_up_to_the_limit_and_longer_ones_run_alone(
    make_bench: Make,
) -> None:
    bench = make_bench(chunk=0, max_prefill=16, mixed=False)
    for rid, size in (("a", 8), ("b", 12), ("c", 4), ("d", 40), ("e", 4)):
        bench.add(rid, [random.randrange(3, 400) for _ in range(size)], max_new_tokens=1)
    bench.run()
    assert sizes(bench) == [[8], [12, 4], [40], [4]]


def test_no_more_requests_run_than_allowed_and_rows_are_reused(make_bench: Make) -> None:
    bench = make_bench(running=2)
    for rid in "abc":
        bench.add(rid, [ord(rid)] * 3, max_new_tokens=4 if rid == "a" else 6)
    bench.run()
    rows = [{seq.row for seq in step.seqs} for step in bench.executor.steps]
    assert max(len(step) for step in rows) == 2
    assert set.union(*rows) == {0, 1}


def test_nobody_overtakes_a_request_that_waits_for_pages(make_bench: Make) -> None:
    bench = make_bench(pages=16, page_size=4, context=64)
    bench.add("a", range(100, 132), max_new_tokens=12)
    bench.step()
    bench.add("large", range(200, 240), max_new_tokens=2)
    bench.add("small", range(5), max_new_tokens=2)
    bench.run()
    first = {rid: said[0].times["scheduled"] for rid, said in bench.deltas.items()}
    assert first["a"] < first["large"] <= first["small"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_request_set_back_for_lack_of_pages_yields_the_same_tokens(
    make_bench: Make, overlap: bool, penalty: float
) -> None:
    bench = make_bench(pages=64, page_size=4, context=220, running=8, overlap=overlap)
    requests = [
        bench.add(
            f"r{i}",
            range(10 * i + 3, 10 * i + 9),
            max_new_tokens=180,
            temperature=float(i % 2),
            sampling_seed=i,
            presence_penalty=penalty * (i % 3),
        )
        for i in range(6)
    ]
    bench.run()
    assert bench.engine.counters["num_retracted_reqs"] > 0
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)
        assert bench.last(request.rid).finish.kind == "length"
    retracted = [bench.last(request.rid).num_retractions for request in requests]
    assert retracted[0] == 0, "the oldest is never set back"
    assert sum(retracted) == bench.engine.counters["num_retracted_reqs"]
    bench.check_pages()


def test_a_shared_beginning_is_computed_once(make_bench: Make) -> None:
    bench = make_bench(chunk=64, max_prefill=64)
    prompt = list(range(100, 122))  # five whole pages and a bit
    requests = [bench.add(rid, [*prompt, ord(rid)], max_new_tokens=2) for rid in "abcd"]
    bench.run()
    assert sizes(bench)[:2] == [[23], [1, 3, 3, 3]]
    assert [bench.last(rid).num_cached for rid in "abcd"] == [0, 20, 20, 20]
    for request in requests:
        assert bench.tokens(request.rid) == bench.expected(request)


def test_a_whole_known_prompt_still_computes_its_last_token(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", range(100, 116), max_new_tokens=1)
    bench.run()
    request = bench.add("b", range(100, 116), max_new_tokens=1)
    bench.run()
    assert bench.last("b").num_cached == 12
    assert bench.tokens("b") == bench.expected(request)


def test_an_answer_is_reused_by_the_next_turn(make_bench: Make) -> None:
    bench = make_bench()
    bench.add("a", range(100, 106), max_new_tokens=7)
    bench.run()
    request = bench.add("b", [*range(100, 106), *bench.tokens("a"), 7, 8], max_new_tokens=3)
    bench.run()
    assert bench.last("b").num_cached == 12
    assert bench.tokens("b") == bench.expected(request)


def test_without_prefix_cache_nothing_is_shared(make_bench: Make) -> None:
    bench = make_bench(cache=False)
    for rid in "ab":
        bench.add(rid, range(100, 116), max_new_tokens=1)
        bench.run()
        assert bench.engine.heartbeat().num_cached_tokens == 0
    assert bench.last("b").num_cached == 0


def random_bench(make_bench: Make, rng: random.Random, **speculation: Any) -> Any:
    chunk = rng.choice([0, 4, 12, 16, 64])
    return make_bench(
        chunk=chunk,
        mixed=rng.random() < 0.6,
        max_prefill=rng.choice([8, 16, 40, 128]),
        running=rng.choice([1, 3, 8]),
        cache=rng.random() < 0.8,
        context=rng.choice([40, 90, 200]),
        pages=rng.choice([6, 12, 30, 80, 150]),
        page_size=rng.choice([1, 4, 8]),
        **speculation,
    )


def random_request(bench: Any, rng: random.Random, rid: str) -> Any:
    room = bench.engine.limits.max_tokens - 1
    if room < 1:
        return None
    shared = [[3] * 100, list(range(100, 200))][rng.randrange(2)][: rng.randrange(0, room + 1)]
    own = [rng.randrange(3, 200) for _ in range(rng.randrange(1, 12))]
    broken = [NAN] if rng.random() < 0.05 else []
    prompt = (shared + own + broken)[-room:]
    scores = rng.random() < 0.3
    most = rng.choice([None, 0, 1, 5, 30, 1000])
    return bench.add(
        rid,
        prompt,
        max_new_tokens=most,
        temperature=rng.choice([0.0, 1.0]),
        sampling_seed=rng.randrange(10**6),
        presence_penalty=rng.choice([0.0, 0.5]),
        min_new_tokens=min(rng.choice([0, 0, 3]), 3 if most is None else most),
        stop_token_ids=tuple(rng.randrange(255) for _ in range(rng.choice([0, 4]))),
        return_logprobs=scores,
        logprob_start=rng.randrange(-1, len(prompt) + 1) if scores else -1,
    )


def disturb(bench: Any, rng: random.Random) -> tuple[dict[str, Any], set[str]]:
    """Requests come, are aborted and set back; return them, and the ids of those aborted."""
    requests: dict[str, Any] = {}
    aborted: set[str] = set()
    for moment in range(120):
        if rng.random() < 0.4:
            rid = f"r{moment}"
            if (request := random_request(bench, rng, rid)) is not None:
                requests[rid] = request
        if rng.random() < 0.05 and requests:
            rid = rng.choice(list(requests))
            ended = bench.engine.abort(Abort(rid=rid))
            aborted |= {delta.rid for delta in ended}
            bench.hear(ended)
        if rng.random() < 0.03:
            bench.drain()
            rng.choice([bench.engine.retract, bench.engine.renew])()
        if bench.engine.has_work:
            bench.step()
    return requests, aborted


def speculation(rng: random.Random, make_draft: Make) -> dict[str, Any]:
    """Drafts that are always right, never, or for a while; some make the logits NaN."""
    return {
        "steps": rng.choice([1, 3, 5]),
        "adaptive": rng.random() < 0.3,
        "draft": make_draft(
            rng.choice([0, 1, 2, 99]), exact=rng.random() < 0.5, nan_rate=rng.choice([0.0, 0.05])
        ),
    }


@pytest.mark.parametrize("mode", ["plain", "drafts", "overlap"])
@pytest.mark.parametrize("seed", range(60))
def test_any_traffic_keeps_the_budget_the_pages_and_the_tokens(
    make_bench: Make,
    make_draft: Make,
    prompt_scores: Callable[..., Any],
    output_scores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    mode: str,
) -> None:
    """The executor asserts the budget; here: each ends once, as if it had been alone."""
    rng = random.Random(seed)
    monkeypatch.setattr(holdings, "_HEADROOM", rng.choice([0, 4, 64]))  # small: more set back
    more = {"drafts": speculation(rng, make_draft), "overlap": {"overlap": True}}
    bench = random_bench(make_bench, rng, **more.get(mode, {}))
    requests, aborted = disturb(bench, rng)
    bench.run()
    for rid, request in requests.items():
        want, got = bench.expected(request), bench.tokens(rid)
        assert bench.last(rid).finish is not None
        if NAN in request.prompt_ids:
            assert rid in aborted or bench.last(rid).finish.code == "nan_logits"
            continue
        assert got == (want[: len(got)] if rid in aborted else want), rid
        if rid in aborted or not request.return_logprobs:
            continue
        said = [entry for delta in bench.deltas[rid] for entry in delta.logprobs]
        assert said == output_scores(request.prompt_ids, got)
        said = [entry for delta in bench.deltas[rid] for entry in delta.prompt_logprobs]
        first = request.logprob_start
        assert said == (prompt_scores(request.prompt_ids, first) if first >= 0 else [])
    bench.check_pages()
