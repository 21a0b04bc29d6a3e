# SPDX-License-Identifier: Apache-2.0
"""The executor with the demo model, against Hugging Face."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.plan import Plan
from tetrarch.config.resolve import resolve
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import (
    Phase,
    PromptScoring,
    SampleSpec,
    SeqChunk,
    SeqResult,
    Step,
    TokenLogprob,
)
from tetrarch.memory.slots import Region
from tetrarch.models.describe import describe
from tetrarch.numerics.contract import CONTRACTS, QuantContract, SourceFormat

Serve = Callable[..., list[list[int]]]
GREEDY = SampleSpec(temperature=0.0, top_logprobs=0)


@pytest.fixture(scope="module")
def demo_plan(demo_path: Path) -> Callable[..., Plan]:
    """Return a factory of resolved plans for the demo model, on one thread and a small pool."""
    path = str(demo_path)
    checkpoint, facts, device = read_checkpoint(path), describe(path), detect("cpu")

    def make(**settings: Any) -> Plan:
        args = LaunchArgs(
            model=path,
            context_length=128,
            max_running_requests=8,
            max_total_tokens=1024,
            page_size=8,
            threads=1,
            **settings,
        )
        return resolve(args, checkpoint, facts, device)

    return make


@pytest.fixture(scope="module")
def demo_fp32(demo_plan: Callable[..., Plan]) -> Executor:
    return Executor(demo_plan(dtype="float32", quantization="none"))


@pytest.fixture(scope="module")
def reference(demo_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        demo_path, dtype=torch.float32, attn_implementation="eager"
    )


def random_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 1024) for _ in range(length)] for length in (37, 5, 1, 64, 18)]


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> list[list[int]]:
    """What Hugging Face generates greedily in FP32, one prompt at a time, past any end token."""
    outputs: list[list[int]] = []
    for prompt in random_prompts():
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def poison(executor: Executor) -> None:
    """Fill every page with NaN: whatever is read before it is written shows in the tokens."""
    for slot in executor._pool.slots.values():
        slot.fill_(torch.nan)


@pytest.mark.parametrize("chunk_tokens", [5, 8, 32, 128])
def test_the_demo_model_generates_what_hugging_face_does(
    demo_fp32: Executor, serve: Serve, expected: list[list[int]], chunk_tokens: int
) -> None:
    """Chunks of one prompt mixed with decodes of the others, over scattered pages of a dirty
    pool, in FP32: token for token."""
    poison(demo_fp32)
    assert serve(demo_fp32, random_prompts(), num_new=12, chunk_tokens=chunk_tokens) == expected


def compute(
    executor: Executor, tokens: list[int], *, start: int, scoring: PromptScoring | None = None
) -> SeqResult:
    """Run one sequence alone in the first pages of the pool."""
    seq = SeqChunk(
        row=0,
        token_ids=tuple(tokens),
        start=start,
        pages=tuple(range(8)),
        samples=(GREEDY,),
        scoring=scoring,
    )
    step = Step(phase=Phase.PREFILL, seqs=(seq,), rank_tokens=(len(tokens),))
    return executor.step(step).seqs[0]


def test_a_stale_page_changes_what_the_demo_model_says(demo_fp32: Executor) -> None:
    """Negative control: 32 of 37 prompt positions were written by another prompt."""
    prompt, other = random_prompts()[0], random_prompts()[3]
    whole = compute(demo_fp32, prompt, start=0)
    compute(demo_fp32, prompt[:32], start=0)
    right = compute(demo_fp32, prompt[32:], start=32)
    compute(demo_fp32, other[:32], start=0)
    stale = compute(demo_fp32, prompt[32:], start=32)
    assert right.token_ids == whole.token_ids
    assert abs(right.logprobs[0].logprob - whole.logprobs[0].logprob) < 1e-4
    assert abs(stale.logprobs[0].logprob - whole.logprobs[0].logprob) > 1e-2


def test_prompt_logprobs_equal_hugging_faces_however_the_prompt_is_cut(
    demo_fp32: Executor, reference: PreTrainedModel
) -> None:
    """The first scored token of a chunk is predicted by the last row of the chunk before it."""
    prompt = random_prompts()[3]
    with torch.inference_mode():
        exact = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    for cut in (64, 20, 7):
        scored: list[TokenLogprob] = []
        for start in range(0, len(prompt), cut):
            end = min(start + cut, len(prompt))
            targets = tuple(prompt[start + 1 : end + 1])
            scoring = PromptScoring(first=0, targets=targets, top_logprobs=1)
            result = compute(demo_fp32, prompt[start:end], start=start, scoring=scoring)
            scored += result.prompt_logprobs
        assert [answer.token_id for answer in scored] == prompt[1:]
        for row, answer in enumerate(scored):
            assert abs(answer.logprob - exact[row, answer.token_id]) < 1e-4
            assert answer.top[0][0] == int(exact[row].argmax())


@pytest.mark.parametrize(
    "contract",
    [contract for contract in CONTRACTS if SourceFormat.BF16 in contract.sources],
    ids=lambda contract: contract.name,
)
def test_the_demo_model_starts_under_every_contract_it_can_have(
    demo_plan: Callable[..., Plan], serve: Serve, contract: QuantContract
) -> None:
    """Packed experts take less than a third of the BF16 ones: 4.5 bits of 16, and scales."""
    executor = Executor(
        demo_plan(
            quantization=contract.quantization.value,
            moe_activations=contract.activations.value,
            decoded_cache="off",
        )
    )
    assert executor.capacity.max_total_tokens == 1024
    assert executor.memory[Region.KV_CACHE] == 1024 * 6 * 2 * 2 * 64 * 2
    experts = sum(layer.weights.num_bytes for layer in executor._model.experts.values())
    in_bf16 = 6 * 8 * 3 * 256 * 128 * 2
    if contract.quantizes_weights:
        assert in_bf16 / 4 < experts < in_bf16 / 3
    else:
        assert experts == in_bf16
    assert [len(new) for new in serve(executor, [[5, 6]], num_new=4, chunk_tokens=32)] == [4]
