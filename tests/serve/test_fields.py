# SPDX-License-Identifier: Apache-2.0
"""Shared fields: sampling parameters, prompts, and what is refused for now."""

from __future__ import annotations

from typing import Any

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import SamplingParams
from tetrarch.serve.fields import (
    MAX_OUTPUTS,
    OPENAI_LATER,
    SamplingFields,
    check_num_outputs,
    read_ids,
    read_prompts,
    refuse_later,
)


def sampling(fields: SamplingFields, **defaults: Any) -> SamplingParams:
    return fields.sampling(max_tokens=16, defaults=defaults, vocab_size=1024)


def test_openai_names_become_the_engines() -> None:
    fields = SamplingFields(seed=5, min_tokens=2, stop="x", logit_bias={"3": 1.5}, temperature=0)
    params = sampling(fields)
    assert params == SamplingParams(
        max_new_tokens=16,
        sampling_seed=5,
        min_new_tokens=2,
        stop=("x",),
        logit_bias={3: 1.5},
        temperature=0.0,
    )


def test_absent_fields_take_the_defaults_and_sent_ones_win() -> None:
    params = sampling(SamplingFields(top_p=0.5), temperature=0.25, top_p=0.75)
    assert (params.temperature, params.top_p) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        (SamplingFields(top_p=1.5), "top_p"),
        (SamplingFields(seed=2**63), "seed"),
        (SamplingFields(min_tokens=17), "min_tokens"),
        (SamplingFields(stop_token_ids=[1024]), "stop_token_ids"),
    ],
)
def test_a_refusal_uses_the_clients_word(fields: SamplingFields, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        sampling(fields)
    assert caught.value.param == key
    assert key in caught.value.what
    assert "_new_" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", (["a"], False)),
        (["a"], (["a"], True)),
        (["a", "b"], (["a", "b"], True)),
        ([1, 2], ([[1, 2]], False)),
        ([[1], [2, 3]], ([[1], [2, 3]], True)),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_batch(value: Any, expected: Any) -> None:
    assert read_prompts(value, "prompt") == expected


@pytest.mark.parametrize(
    "value", [None, 1, 1.5, True, {}, [], [[]], ["a", 1], [[1], "a"], [1.0], [True], [[1, [2]]]]
)
def test_anything_else_is_no_prompt(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompts(value, "prompt")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("value", ["a", ["a"], ["1"], [[1], ["a"]], [], [[]], [True], [1.0], None])
def test_text_is_no_list_of_ids(value: Any) -> None:
    assert read_ids([1, 2], "input_ids") == ([[1, 2]], False)
    assert read_ids([[1, 2]], "input_ids") == ([[1, 2]], True)
    with pytest.raises(RequestError) as caught:
        read_ids(value, "input_ids")
    assert caught.value.param == "input_ids"


def test_the_outputs_of_one_request_are_bounded() -> None:
    check_num_outputs(MAX_OUTPUTS)
    with pytest.raises(RequestError, match="16384 at most") as caught:
        check_num_outputs(MAX_OUTPUTS + 1)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    "body",
    [
        {},
        dict.fromkeys(OPENAI_LATER),
        {"tools": [], "suffix": "", "return_hidden_states": False},
        {"response_format": {"type": "text"}, "tool_choice": "auto"},
        {"lora_path": [None, None], "modalities": ["text"], "use_beam_search": False},
    ],
)
def test_neutral_values_of_later_features_are_accepted(body: dict[str, Any]) -> None:
    refuse_later(body, OPENAI_LATER)
    assert OPENAI_LATER  # else nothing was checked


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": "text"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"suffix": "x"},
        {"regex": "a+"},
        {"modalities": ["text", "audio"]},
        {"use_beam_search": True},
    ],
)
def test_a_request_for_a_later_feature_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        refuse_later(body, OPENAI_LATER)
    assert caught.value.param == next(iter(body))
