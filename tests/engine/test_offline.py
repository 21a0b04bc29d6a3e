# SPDX-License-Identifier: Apache-2.0
"""What a program may pass to `LLM.generate`, and what is refused before it is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.offline import check_readable, list_prompts, list_sampling
from tetrarch.engine.request import GenerateRequest, SamplingParams


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("hi", ["hi"]),
        ([], []),
        ([1, 2], [(1, 2)]),
        ([[1], "hi"], [(1,), "hi"]),
        ((text for text in "ab"), ["a", "b"]),
    ],
)
def test_one_text_or_one_list_of_ids_is_one_prompt(prompts: Any, listed: list[Any]) -> None:
    assert list_prompts(prompts) == listed


@pytest.mark.parametrize("prompts", [None, 5, b"hi", {"a": 1}, [None], [1.5], [b"hi"], [5, "hi"]])
def test_anything_else_is_no_prompt_and_none_is_dropped(prompts: Any) -> None:
    with pytest.raises(RequestError, match="a text, a list of token ids") as caught:
        list_prompts(prompts)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize("sampling", [5, {"n": 1}, [None], [SamplingParams(), {"n": 1}]])
def test_what_are_no_sampling_parameters_is_refused(sampling: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams"):
        list_sampling(sampling, 1)


@pytest.mark.parametrize("bad", [True, 1.5, "a", None, 10**30, -1, np.int64(5), [1]])
def test_ids_that_the_engine_could_not_read_are_refused(bad: Any) -> None:
    request = GenerateRequest(rid="0", prompt_ids=(1, bad), sampling=SamplingParams())
    with pytest.raises(RequestError, match="wrong type"):
        check_readable(request)


@pytest.mark.parametrize("field", [{"logprob_start": True}, {"top_logprobs": 1.5}])
def test_so_are_other_fields_of_another_type(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="wrong type"):
        check_readable(
            GenerateRequest(rid="0", prompt_ids=(1,), sampling=SamplingParams(), **field)
        )


def test_a_text_that_is_not_unicode_is_refused() -> None:
    sampling = SamplingParams(stop=("\ud800",))
    with pytest.raises(RequestError, match="wrong type"):
        check_readable(GenerateRequest(rid="0", prompt_ids=(1,), sampling=sampling))


def test_a_good_request_is_handed_on() -> None:
    request = GenerateRequest(rid="0", prompt_ids=(1, 2), sampling=SamplingParams())
    assert check_readable(request) is request
