# SPDX-License-Identifier: Apache-2.0
"""`--deterministic` through the offline door: same request, same ids, same logprob bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tetrarch import LLM, Logprobs, SamplingParams
from tetrarch.llm import Output

QUESTION = (
    "<|im_start|>user\nTom has 12 apples and buys {} more. How many apples has he now?"
    "<|im_end|>\n<|im_start|>assistant\n"
)
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=24),
    SamplingParams(temperature=1.5, top_p=0.95, min_p=0.01, sampling_seed=7, max_new_tokens=24),
]
TOP = Logprobs(top=3)
SMALL = {"quantization": "nvfp4_online", "max_total_tokens": 8192, "threads": 1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(deterministic=True, **SMALL) as llm:
        yield llm


def bits(output: Output) -> tuple[object, ...]:
    return output.token_ids, output.logprobs, output.finish_reason


def alone(llm: LLM, params: SamplingParams) -> tuple[object, ...]:
    [output] = llm.generate(QUESTION.format(30), params, logprobs=TOP)
    return bits(output)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_company_and_a_cached_prefix_change_nothing(llm: LLM, params: SamplingParams) -> None:
    want = alone(llm, params)
    assert alone(llm, params) == want, "its prompt is in the prefix cache by now"
    for size in (7, 33):
        others = [QUESTION.format("many " * (i % 9) + str(i)) for i in range(size - 1)]
        prompts = [*others[: size // 2], QUESTION.format(30), *others[size // 2 :]]
        outputs = llm.generate(prompts, params, logprobs=TOP)
        assert bits(outputs[size // 2]) == want


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 16, "page_size": 16, "disable_radix_cache": True},
        {"speculative_algorithm": "MTP"},
    ],
    ids=["short chunks without a cache", "speculation"],
)
def test_nor_do_chunks_drafts_and_another_process(llm: LLM, settings: dict[str, object]) -> None:
    want = [alone(llm, params) for params in PARAMS]
    with LLM(deterministic=True, **SMALL, **settings) as other:
        assert [alone(other, params) for params in PARAMS] == want
        [output] = other.generate(QUESTION.format(30), PARAMS[0])
        assert (output.acceptance is not None) == ("speculative_algorithm" in settings)
