# SPDX-License-Identifier: Apache-2.0
"""The engine over the demo model: batches, chunks, caches and retractions change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tetrarch.config.plan import Plan, SpecPlan
from tetrarch.engine import holdings
from tetrarch.engine.engine import Engine
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.engine.text import Tokenizer
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import TokenLogprob
from tetrarch.numerics.contract import SourceFormat

CONTEXT = 96


@pytest.fixture(scope="module")
def plan(make_plan: Callable[..., Plan], demo_path: Path) -> Plan:
    """FP32, so that the shape of a batch does not decide between two equal tokens."""
    made = make_plan(demo_path, dtype="float32", source=SourceFormat.BF16)
    return replace(
        made,
        model=replace(made.model, context_len=CONTEXT),
        memory=replace(made.memory, max_total_tokens=2 * CONTEXT),
        schedule=replace(made.schedule, chunk_tokens=16),
    )


@pytest.fixture(scope="module")
def executor(plan: Plan) -> Executor:
    return Executor(plan)


@pytest.fixture(scope="module")
def drafting(plan: Plan) -> Plan:
    return replace(plan, spec=SpecPlan("mtp", num_steps=3, num_draft_tokens=4))


@pytest.fixture(scope="module")
def drafting_executor(drafting: Plan) -> Executor:
    return Executor(drafting)


@pytest.fixture(scope="module")
def alone(
    plan: Plan, executor: Executor, requests: list[GenerateRequest], demo_tokenizer: Tokenizer
) -> dict[str, Heard]:
    """What each request yields without the others, in one chunk, without cache and drafts."""
    schedule = replace(plan.schedule, prefix_cache=False, chunk_tokens=0, mixed_chunk=False)
    alone_plan = replace(plan, schedule=schedule)
    heard: dict[str, Heard] = {}
    for request in requests:
        heard |= run(Engine(alone_plan, executor, demo_tokenizer), [request])
    return heard


@pytest.fixture(scope="module")
def requests(demo_tokenizer: Tokenizer) -> list[GenerateRequest]:
    made: list[GenerateRequest] = []
    for index in range(5):
        question = (
            f"Tom sells red apples on the big market. He has {30 + index} and buys {12 + index}."
        )
        prompt = demo_tokenizer.encode_chat([{"role": "user", "content": question}])
        sampling = SamplingParams(
            max_new_tokens=None,
            temperature=float(index % 2),
            sampling_seed=index,
            repetition_penalty=1.0 + 0.1 * (index == 2),
            ignore_eos=True,
        )
        made.append(
            GenerateRequest(
                rid=str(index),
                prompt_ids=tuple(prompt),
                sampling=sampling,
                return_logprobs=True,
                logprob_start=20 + index if index % 3 else -1,
                top_logprobs=2,
            )
        )
    return made


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt: list[TokenLogprob] = []


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, Heard]:
    heard = {request.rid: Heard() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            heard[delta.rid].tokens += delta.token_ids
            heard[delta.rid].logprobs += delta.logprobs
            heard[delta.rid].prompt += delta.prompt_logprobs
    return heard


def close(left: list[TokenLogprob], right: list[TokenLogprob]) -> bool:
    """Whether two scorings say the same, up to FP32 sums in another order."""
    return [entry.token_id for entry in left] == [entry.token_id for entry in right] and all(
        one.logprob == pytest.approx(other.logprob, abs=2e-3)
        for one, other in zip(left, right, strict=True)
    )


def check(
    heard: dict[str, Heard], alone: dict[str, Heard], requests: list[GenerateRequest]
) -> None:
    for request in requests:
        want, got = alone[request.rid], heard[request.rid]
        assert got.tokens == want.tokens
        assert len(got.tokens) == CONTEXT - len(request.prompt_ids)
        assert close(got.logprobs, want.logprobs)
        assert close(got.prompt, want.prompt)
        start = request.logprob_start
        assert len(got.prompt) == (len(request.prompt_ids) - start if start > 0 else 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_and_logprobs_are_those_of_each_request_alone(
    plan: Plan,
    executor: Executor,
    requests: list[GenerateRequest],
    alone: dict[str, Heard],
    demo_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
) -> None:
    monkeypatch.setattr(holdings, "_HEADROOM", 0)  # so that pages run out
    plan = replace(plan, schedule=replace(plan.schedule, overlap=overlap))
    engine = Engine(plan, executor, demo_tokenizer)
    together = run(engine, requests)
    assert engine.counters["num_retracted_reqs"] > 0
    assert engine.counters["cached_tokens_total"] > 0
    check(together, alone, requests)


@pytest.mark.parametrize("chunk_tokens", [16, 48])
def test_drafts_change_neither_tokens_nor_logprobs(
    drafting: Plan,
    drafting_executor: Executor,
    requests: list[GenerateRequest],
    alone: dict[str, Heard],
    demo_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int,
) -> None:
    """Greedy and sampled, with penalties; chunks, prefix hits and retractions among them."""
    monkeypatch.setattr(holdings, "_HEADROOM", 0)
    schedule = replace(drafting.schedule, chunk_tokens=chunk_tokens)
    engine = Engine(replace(drafting, schedule=schedule), drafting_executor, demo_tokenizer)
    together = run(engine, requests)
    assert engine.counters["num_retracted_reqs"] > 0
    assert engine.counters["cached_tokens_total"] > 0
    spec = engine.heartbeat().spec
    assert spec is not None
    assert spec.lifetime.num_accepted > 50, "drafts have been part of the outputs"
    assert spec.lifetime.num_accepted < spec.lifetime.num_proposed, "and some were wrong"
    check(together, alone, requests)


def test_an_answer_ends_at_the_models_own_end_token(
    plan: Plan, executor: Executor, demo_tokenizer: Tokenizer
) -> None:
    prompt = demo_tokenizer.encode_chat([{"role": "user", "content": "What is 12 + 30?"}])
    sampling = SamplingParams(temperature=0.0, max_new_tokens=100)
    request = GenerateRequest(rid="q", prompt_ids=tuple(prompt), sampling=sampling)
    tokens = run(Engine(plan, executor), [request])["q"].tokens
    assert demo_tokenizer.decode(tokens).endswith("42")
    assert tokens[-1] in demo_tokenizer.eos_ids
