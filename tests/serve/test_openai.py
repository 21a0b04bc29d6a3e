# SPDX-License-Identifier: Apache-2.0
"""From prompts to requests: one for each output, prompt-major, under ids that can be aborted."""

from __future__ import annotations

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import SamplingParams
from tetrarch.serve.openai import Logprobs, check_prompt, fan_out_prompts


def test_every_output_of_every_prompt_is_a_request() -> None:
    sampling = SamplingParams(n=2, sampling_seed=7)
    wanted = Logprobs(wanted=True, start=0, top=3)
    requests = fan_out_prompts("cmpl-x", [[1, 2], [3]], sampling, logprobs=wanted)
    assert [request.rid for request in requests] == [
        "cmpl-x_0_0",
        "cmpl-x_0_1",
        "cmpl-x_1_0",
        "cmpl-x_1_1",
    ]
    assert [request.prompt_ids for request in requests] == [(1, 2), (1, 2), (3,), (3,)]
    assert [request.sampling.sampling_seed for request in requests] == [7, 8, 7, 8]
    assert all(request.sampling.n == 1 for request in requests)
    assert all(
        (request.return_logprobs, request.logprob_start, request.top_logprobs) == (True, 0, 3)
        for request in requests
    )


def test_one_prompt_keeps_the_public_id() -> None:
    [request] = fan_out_prompts("cmpl-x", [[1]], SamplingParams(), logprobs=Logprobs())
    assert request.rid == "cmpl-x"
    assert not request.return_logprobs


def test_an_empty_prompt_is_refused_by_its_key() -> None:
    assert check_prompt([4], "prompt") == [4]
    with pytest.raises(RequestError, match="prompt is empty") as caught:
        check_prompt([], "prompt")
    assert caught.value.param == "prompt"
