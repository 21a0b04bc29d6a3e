# SPDX-License-Identifier: Apache-2.0
"""What can never be served is refused before it queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.core.errors import RequestError

Make = Callable[..., Any]


def test_stop_strings_need_a_tokenizer(make_bench: Make) -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        make_bench().add("a", [3], stop=("x",))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(prompt=[]), "input_ids"),
        (dict(prompt=[3, 512]), "input_ids"),
        (dict(prompt=[3, -1]), "input_ids"),
        (dict(prompt=[3] * 128), "input_ids"),
        (dict(prompt=[3], logprob_start=2), "logprob_start_len"),
        (dict(prompt=[3], logprob_start=-2), "logprob_start_len"),
        (dict(prompt=[3], top_logprobs=-1), "top_logprobs_num"),
        (dict(prompt=[3], logprob_ids=(512,)), "token_ids_logprob"),
        (dict(prompt=[3], top_p=7.0), "top_p"),
        (dict(prompt=[3], n=2), "n"),
        (dict(prompt=[3], stop_token_ids=(512,)), "stop_token_ids"),
    ],
)
def test_what_can_never_be_served_is_refused_at_the_door(
    make_bench: Make, fields: Any, param: str
) -> None:
    bench = make_bench()
    with pytest.raises(RequestError) as caught:
        bench.add("a", **fields)
    assert caught.value.param == param
    assert not bench.engine.has_work


def test_a_prompt_over_the_limit_is_told_both_numbers(make_bench: Make) -> None:
    with pytest.raises(RequestError, match=r"200 tokens.*127(.|\n)*128"):
        make_bench().add("a", [3] * 200)
    with pytest.raises(RequestError, match=r"100 tokens.*31(.|\n)*KV cache 32"):
        make_bench(pages=8).add("a", [3] * 100)
