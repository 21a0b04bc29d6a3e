# SPDX-License-Identifier: Apache-2.0
"""Every key has a rule, and every refusal names the key and its bound."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import SamplingParams
from tetrarch.engine.sampling import check_sampling, parse_sampling

VOCAB = 100


def test_nothing_means_the_defaults() -> None:
    assert parse_sampling(None, vocab_size=VOCAB) == SamplingParams()
    assert parse_sampling({}, vocab_size=VOCAB) == SamplingParams()


def test_null_means_the_default_or_none_where_none_is_a_value() -> None:
    raw = dict.fromkeys(msgspec.structs.asdict(SamplingParams()))
    params = parse_sampling(raw, vocab_size=VOCAB)
    assert params == SamplingParams(max_new_tokens=None)


def test_values_are_completed() -> None:
    raw = {
        "stop": "end",
        "stop_token_ids": 5,
        "temperature": 1,
        "logit_bias": {"7": -3, "8": 0.5},
        "custom_params": {"anything": 1},
        "regex": None,
    }
    params = parse_sampling(raw, vocab_size=VOCAB)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (5,)
    assert type(params.temperature) is float
    assert params.logit_bias == {7: -3.0, 8: 0.5}


ACCEPTED = {
    "max_new_tokens": [0, 1, 2**63 - 1],
    "temperature": [0, 0.0, 1e9],
    "top_p": [1e-9, 1, 1.0],
    "top_k": [-1, 1, 10**6],
    "min_p": [0, 1],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 2],
    "n": [1, 1024],
    "sampling_seed": [-(2**63), 2**63 - 1],
    "stream_interval": [1],
    "stop": ["x", [], ["x"] * 32, ["x" * 1024]],
    "stop_regex": [
        "x",
        [],
        [r"\d+\."] * 32,
        ["é" * 128],
        [r"(?:[0-9a-f]{4}-?){8}"],
        [r"(?m)^END$"],
    ],
    "stop_token_ids": [[], [0, 99]],
    "logit_bias": [{}, {"0": 1.5}, {99: -1e30}],
    "ignore_eos": [True, False],
}
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "max_new_tokens": ("at least 0", [-1, 1.0, True, "5", 2**63, 10**400, [1]]),
    "min_new_tokens": ("at least 0", [-1, False]),
    "temperature": ("at least 0", [-0.1, math.nan, math.inf, True, "1", 10**400]),
    "top_p": ("above 0 and at most 1", [0, 1.1, -1, math.nan]),
    "top_k": ("at least 1, or -1", [0, -2, 1.5, True]),
    "min_p": ("at least 0 and at most 1", [-0.1, 1.1]),
    "frequency_penalty": ("at least -2 and at most 2", [-2.1, 2.1]),
    "presence_penalty": ("at least -2 and at most 2", [3]),
    "repetition_penalty": ("above 0 and at most 2", [0, 2.5]),
    "n": ("at least 1 and at most 1024", [0, 1025, True]),
    "sampling_seed": ("a 64-bit integer", [2**63, -(2**63) - 1, 1.0]),
    "stream_interval": ("at least 1", [0]),
    "stop": ("at most 32 strings", [5, [5], ["x"] * 33, "", ["a", ""], "x" * 1025, {"a": 1}]),
    "stop_regex": ("at most 32 regular", [5, [5], ["x"] * 33, "", "é" * 129, {"a": 1}]),
    "stop_token_ids": ("at most 32", [[1.0], ["1"], [True], list(range(33))]),
    "logit_bias": (
        "finite numbers keyed by token id",
        [[1], {"a": 1}, {"1": None}, {"-1": 1}, {"1": 1e31}],
    ),
    "ignore_eos": ("true or false", [1, "true"]),
    "skip_special_tokens": ("true or false", [0]),
    "spaces_between_special_tokens": ("true or false", ["no"]),
    "no_stop_trim": ("true or false", [[]]),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k in ACCEPTED for v in ACCEPTED[k]])
def test_values_within_bounds_are_taken(key: str, value: Any) -> None:
    params = msgspec.structs.asdict(parse_sampling({key: value}, vocab_size=VOCAB))
    want: Any = tuple(value) if isinstance(value, str | list) else value
    if isinstance(value, dict):
        want = {int(name): amount for name, amount in value.items()}
    assert params[key] == want


@pytest.mark.parametrize(
    ("key", "bound", "value"), [(k, bound, v) for k, (bound, vs) in REFUSED.items() for v in vs]
)
def test_values_out_of_bounds_are_refused_with_key_and_bound(
    key: str, bound: str, value: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_sampling({key: value}, vocab_size=VOCAB)
    assert caught.value.param == key
    assert key in caught.value.what
    assert bound in caught.value.what
    assert len(caught.value.what) < 250


def test_every_key_is_tested() -> None:
    assert set(REFUSED) == set(msgspec.structs.asdict(SamplingParams()))


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens", "max_new_tokens=8"),
        ({"min_new_tokens": 129}, "min_new_tokens", "max_new_tokens=128"),
        ({"stop_token_ids": [100]}, "stop_token_ids", "0 to 99"),
        ({"logit_bias": {"100": 1}}, "logit_bias", "0 to 99"),
        ([], "sampling_params", "an object"),
        ("x", "sampling_params", "an object"),
    ],
)
def test_bounds_that_depend_on_more_than_the_value(raw: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_sampling(raw, vocab_size=VOCAB)
    assert caught.value.param == param


def test_a_misspelt_key_is_refused_with_the_accepted_names() -> None:
    with pytest.raises(RequestError) as caught:
        parse_sampling({"max_tokens": 5}, vocab_size=VOCAB)
    assert caught.value.param == "max_tokens"
    assert "did you mean 'max_new_tokens'?" in caught.value.fix
    for name in msgspec.structs.asdict(SamplingParams()):
        assert name in caught.value.fix


@pytest.mark.parametrize("key", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_grammars_are_refused_by_name(key: str) -> None:
    with pytest.raises(RequestError, match="not supported yet") as caught:
        parse_sampling({key: "x"}, vocab_size=VOCAB)
    assert caught.value.param == key


def test_parameters_built_by_a_program_meet_the_same_rules() -> None:
    params: Any = SamplingParams(stop="x", temperature=1)  # pyright: ignore
    assert check_sampling(params, vocab_size=VOCAB).stop == ("x",)
    with pytest.raises(RequestError, match="top_p"):
        check_sampling(SamplingParams(top_p=2.0), vocab_size=VOCAB)
    whole = SamplingParams(stop=("a", "b"), logit_bias={3: 1.0}, sampling_seed=7, top_k=4)
    assert check_sampling(whole, vocab_size=VOCAB) == whole
