# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`: roles, chunks in their order, content as parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

ANSWER = "The answer is 42. It is 42!"
QUESTION = [{"role": "user", "content": "What is 40 + 2?"}]


def _chat(server: Any, **body: Any) -> Any:
    reply = server.http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_answer_is_a_message(server: Any) -> None:
    reply = _chat(server)
    [choice] = reply["choices"]
    assert reply["object"] == "chat.completion"
    assert choice["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "reasoning_content": None,
        "tool_calls": None,
    }
    assert choice["finish_reason"] == "stop"
    sent = server.engine.requests[-1]
    expected = server.door.tokenizer.encode_chat(QUESTION)
    assert list(sent.prompt_ids) == expected
    assert sent.sampling.temperature == 0.0  # the checkpoint's generation config says so


def test_content_may_be_parts_and_both_names_bound_the_length(server: Any) -> None:
    parts = [{"type": "text", "text": "What is 40 + 2?"}]
    _chat(server, messages=[{"role": "user", "content": parts}], max_completion_tokens=3)
    sent = server.engine.requests[-1]
    assert list(sent.prompt_ids) == server.door.tokenizer.encode_chat(QUESTION)
    assert sent.sampling.max_new_tokens == 3
    _chat(server, max_tokens=4)
    assert server.engine.requests[-1].sampling.max_new_tokens == 4


def test_a_stream_opens_with_the_role_and_closes_with_the_reason(server: Any) -> None:
    body = {"messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *chunks, usage = map(json.loads, lines)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert (first["delta"]["role"], first["delta"]["content"]) == ("assistant", "")
    assert "".join(piece["delta"]["content"] or "" for piece in (*middle, last)) == ANSWER
    assert (last["finish_reason"], last["matched_stop"]) == ("stop", 2)
    assert all(piece["finish_reason"] is None for piece in (first, *middle))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("reasoning_content" in piece["delta"] for piece in (first, *middle))


def test_logprobs_carry_bytes_and_alternatives(server: Any) -> None:
    [choice] = _chat(server, logprobs=True, top_logprobs=2, max_tokens=3)["choices"]
    ids = server.door.tokenizer.encode(ANSWER)[:3]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-0.5 - one / 1024 for one in ids]
    assert (
        bytes(byte for entry in entries for byte in entry["bytes"]).decode()
        == ANSWER[: len(server.door.tokenizer.decode(ids))]
    )
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_p": 0}, "top_p"),
        ({"max_completion_tokens": "ten"}, "max_completion_tokens"),
    ],
)
def test_a_bad_request_is_400_and_names_the_key(
    server: Any, body: dict[str, Any], key: str
) -> None:
    reply = server.http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
    assert reply.status_code == 400, reply.text
    assert key in reply.json()["message"] or key == reply.json()["param"]


def test_what_asks_for_nothing_is_accepted(server: Any) -> None:
    neutral = {"tools": None, "response_format": {"type": "text"}, "logprobs": False, "n": 1}
    assert _chat(server, **neutral)["choices"][0]["message"]["content"] == ANSWER


def test_two_outputs_have_two_indices(server: Any) -> None:
    reply = _chat(server, n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
