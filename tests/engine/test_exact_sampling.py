# SPDX-License-Identifier: Apache-2.0
"""What is drawn under speculation has exactly the target's distribution.

The target here is a table: the logits of a token depend on the one before it alone. So the
distribution of three tokens can be worked out in FP64, by another way than the sampler's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tetrarch.executor.results import Draws
from tetrarch.executor.step import Done, Pending, SeqChunk, SeqResult, Step, StepResult

Make = Callable[..., Any]
VOCAB = 6
NUM_TOKENS = 3  # of each output: one of the prompt, then a run of two where the draft is right
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
FIRST = 4  # the prompt
NUM_SAMPLES = 10_000
CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 3, "logit_bias": {2: 1.5}},
    {"temperature": 1.0, "frequency_penalty": 1.2, "repetition_penalty": 1.4},
]


class TableExecutor:
    """Draws from the table; drafts the likeliest token, as a good draft would."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank
        self.verify: Callable[[SeqChunk, SeqResult], SeqResult] = lambda _, result: result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def launch(self, step: Step) -> Pending:
        rows = [seq.token_ids[-len(seq.samples) :] for seq in step.seqs]
        logits = TABLE[[token for tokens in rows for token in tokens]]
        results = Draws(step, logits).wait().seqs
        done = [self.verify(*pair) for pair in zip(step.seqs, results, strict=True)]
        results = tuple(
            replace(one, drafts=_guess(one.token_ids[-1], seq.draft.num_drafts))
            if seq.draft
            else one
            for seq, one in zip(step.seqs, done, strict=True)
        )
        return Done(StepResult(results))


def _guess(token: int, count: int) -> tuple[int, ...]:
    drafts: list[int] = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        drafts.append(token)
    return tuple(drafts)


def outputs_of(
    make_bench: Make, case: dict[str, Any], *, steps: int, num_samples: int, **more: Any
) -> Any:
    bench = make_bench(
        steps=steps, pages=2048, page_size=8, running=500, max_prefill=512, chunk=512, cache=False
    )
    bench.executor = bench.engine.rank = TableExecutor(bench.executor)
    for name, value in more.items():
        setattr(bench.executor, name, value)
    for seed in range(num_samples):
        bench.add(str(seed), [FIRST], max_new_tokens=NUM_TOKENS + 1, sampling_seed=seed, **case)
    while bench.engine.has_work:
        bench.step()
    spec = bench.engine.heartbeat().spec
    return [bench.tokens(str(seed))[:NUM_TOKENS] for seed in range(num_samples)], spec


def next_distribution(history: tuple[int, ...], case: dict[str, Any]) -> np.ndarray[Any, Any]:
    """In FP64, token by token, as the documentation of each parameter says."""
    logits = TABLE[history[-1]].double().numpy().copy()
    outputs = Counter(history[1:])
    for token in range(VOCAB):
        if token in history and (penalty := case.get("repetition_penalty", 1.0)) != 1.0:
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        logits[token] -= case.get("frequency_penalty", 0.0) * outputs[token]
        logits[token] += case.get("logit_bias", {}).get(token, 0.0)
    probs = np.exp(logits / case["temperature"])
    order = np.argsort(-probs)
    kept = order[: case.get("top_k", VOCAB)]
    mass = np.cumsum(probs[kept]) / probs[kept].sum()
    kept = kept[: int(np.searchsorted(mass, case.get("top_p", 1.0))) + 1]
    kept = [token for token in kept if probs[token] >= case.get("min_p", 0.0) * probs.max()]
    result = np.zeros(VOCAB)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def exact(case: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of each output."""
    found: dict[tuple[int, ...], float] = {}
    for output in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        history, chance = (FIRST,), 1.0
        for token in output:
            chance *= next_distribution(history, case)[token]
            history = (*history, token)
        if chance > 0:
            found[output] = chance
    return found


def misfit(outputs: Sequence[tuple[int, ...]], case: dict[str, Any]) -> float:
    """Chi-square over all outputs, in standard deviations from what chance alone gives.

    Outputs expected fewer than five times count as one.
    """
    counts, num_samples, total = Counter(outputs), len(outputs), 0.0
    rare_seen = rare_expected = 0.0
    num_cells = 0
    for output, chance in exact(case).items():
        expected, seen = chance * num_samples, counts.pop(output, 0)
        if expected < 5:
            rare_seen, rare_expected = rare_seen + seen, rare_expected + expected
            continue
        total += (seen - expected) ** 2 / expected
        num_cells += 1
    assert not counts, "drew what cannot be drawn"
    if rare_expected > 0:
        total += (rare_seen - rare_expected) ** 2 / rare_expected
        num_cells += 1
    return (total - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_thousand_outputs_are_distributed_as_the_target_says(
    make_bench: Make, case: dict[str, Any]
) -> None:
    outputs, spec = outputs_of(make_bench, case, steps=3, num_samples=NUM_SAMPLES)
    assert spec.lifetime.num_verifies >= NUM_SAMPLES
    assert 0.2 < spec.lifetime.rate < 0.9, "some drafts are right and some are not"
    assert misfit(outputs, case) < 4
    plain, _ = outputs_of(make_bench, case, steps=0, num_samples=500)
    assert outputs[: len(plain)] == plain, "not merely as likely: the same"


def test_a_verification_that_takes_the_likeliest_token_would_be_found_out(
    make_bench: Make,
) -> None:
    """Negative control: what upstream did on devices without a sampling kernel."""

    def greedy(seq: SeqChunk, result: SeqResult) -> SeqResult:
        if not seq.drafts:
            return result
        likeliest = [int(TABLE[token].argmax()) for token in seq.token_ids]
        return SeqResult(token_ids=tuple(likeliest[: len(seq.drafts)]))

    outputs, _ = outputs_of(make_bench, CASES[0], steps=3, num_samples=1000, verify=greedy)
    assert misfit(outputs, CASES[0]) > 10
