# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a launch waits for nothing, and steps that overlap say what steps one by one say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.resolve import resolve
from tetrarch.engine.engine import Engine
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Pending, Phase, Step
from tetrarch.models.describe import describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    "edited": {"logit_bias": {5: -3.0}, "min_new_tokens": 8, "repetition_penalty": 1.2},
    "scored": {},
}


@pytest.fixture(scope="module")
def executor(demo_path: Path) -> Executor:
    args = LaunchArgs(
        model=str(demo_path),
        quantization="none",
        device="cuda",
        context_length=512,
        max_running_requests=16,
        max_total_tokens=8192,
        graph_max_batch=16,
    )
    path = str(demo_path)
    return Executor(resolve(args, read_checkpoint(path), describe(path), detect("cuda")))


def requests(kind: str) -> Iterator[GenerateRequest]:
    for index in range(16):
        scores = kind == "scored"
        yield GenerateRequest(
            rid=f"r{index}",
            prompt_ids=tuple((index * 7 + at * 13) % 900 + 3 for at in range(20 + index)),
            sampling=SamplingParams(
                **{"max_new_tokens": 30 + index, "temperature": 0.0, **KINDS[kind]},
                ignore_eos=True,
                sampling_seed=index,
            ),
            return_logprobs=scores,
            top_logprobs=2 if scores else 0,
            logprob_start=5 if scores else -1,
        )


def run(executor: Executor, kind: str, *, overlap: bool) -> dict[str, Any]:
    schedule = replace(executor.plan.schedule, overlap=overlap)
    engine = Engine(replace(executor.plan, schedule=schedule), executor)
    heard: dict[str, Any] = {}
    for request in requests(kind):
        engine.add(request)
        heard[request.rid] = []
    while engine.has_work:
        for delta in engine.step():
            heard[delta.rid] += [*delta.token_ids, *delta.logprobs, *delta.prompt_logprobs]
    return heard


@pytest.mark.parametrize("kind", KINDS)
def test_overlapping_steps_say_the_same(executor: Executor, kind: str) -> None:
    """To the last bit of a logprob: the same steps run, with some rows more."""
    one_by_one, overlapping = (run(executor, kind, overlap=overlap) for overlap in (False, True))
    assert overlapping == one_by_one


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_is_launched_without_waiting_for_the_device(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """torch raises where one of its calls would wait."""
    launch: Callable[[Step], Pending] = executor.launch

    def watched(step: Step) -> Pending:
        torch.cuda.set_sync_debug_mode("error" if step.phase is Phase.DECODE else "default")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(executor, "launch", watched)
    heard = run(executor, kind, overlap=True)
    assert all(len(said) >= 30 for said in heard.values()), "and every request has been served"
