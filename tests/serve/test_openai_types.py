# SPDX-License-Identifier: Apache-2.0
"""Usage counts a prompt once, and what is absent is absent on the wire."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from tetrarch.engine.acceptance import Acceptance
from tetrarch.serve.openai_types import ChatChunkChoice, ChatMessage, CompletionChoice, usage_of


def _output(prompt: int, completion: int, cached: int, acceptance: Acceptance | None = None) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(prompt_ids=(0,) * prompt),
        token_ids=[0] * completion,
        num_cached=cached,
        acceptance=acceptance,
    )


def test_usage_counts_each_prompt_once_and_every_output() -> None:
    outputs = cast("Any", [_output(5, 2, 1), _output(5, 3, 4), _output(7, 1, 0), _output(7, 4, 6)])
    usage = usage_of(outputs, num_choices=2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 10, 22)
    assert "completion_tokens_details" not in json.loads(msgspec.json.encode(usage))


def test_usage_says_how_many_drafts_were_right_and_how_many_were_not() -> None:
    drafted = [Acceptance(num_proposed=9, num_accepted=7), None, Acceptance(num_proposed=3)]
    outputs = [_output(5, 2, 0, acceptance) for acceptance in drafted]
    usage = json.loads(msgspec.json.encode(usage_of(outputs, num_choices=1)))
    assert usage["completion_tokens"] == 6
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 5,
    }


def test_optional_keys_stay_off_the_wire_and_required_nulls_stay_on() -> None:
    choice = CompletionChoice(
        index=0, text="a", logprobs=None, finish_reason=None, matched_stop=None
    )
    assert json.loads(msgspec.json.encode(choice)) == {
        "index": 0,
        "text": "a",
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }
    chunk = ChatChunkChoice(
        index=1,
        delta=ChatMessage(role="assistant", content=""),
        logprobs=None,
        finish_reason=None,
        matched_stop=None,
    )
    assert json.loads(msgspec.json.encode(chunk))["delta"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": None,
        "tool_calls": None,
    }
