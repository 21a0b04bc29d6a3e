# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`: roles, chunks in their order, content as parts."""

from __future__ import annotations

import json
from typing import Any

import httpx
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


def test_each_streamed_output_has_its_own_role_and_reason(server: Any) -> None:
    options = {"continuous_usage_stats": True}
    body = {"messages": QUESTION, "n": 2, "stream": True, "stream_options": options}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert all(chunk["choices"] for chunk in chunks)  # no usage chunk: it was not asked for
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert totals == sorted(totals)
    assert totals[-1] == 2 * (len(server.door.tokenizer.encode(ANSWER)) + 1)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [piece["delta"]["role"] for piece in mine] == ["assistant"] + [None] * (
            len(mine) - 1
        )
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert "".join(piece["delta"]["content"] or "" for piece in mine) == ANSWER


def test_nothing_is_sent_before_the_first_token(fresh_server: Any) -> None:
    """Neither the status line nor the role: both would pass for progress."""
    fresh_server.make_ready()
    fresh_server.engine.pause = True
    body = {"messages": QUESTION, "stream": True}
    with (
        pytest.raises(httpx.ReadTimeout),
        fresh_server.http.stream("POST", "/v1/chat/completions", json=body, timeout=0.3),
    ):
        pass
    assert len(fresh_server.engine.requests) == 1


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [*QUESTION, {"role": "robot", "content": "x"}]}, "messages[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a " * 500}]}, "messages"),
        ({"messages": QUESTION, "chat_template_kwargs": {"tokenize": True}}, "chat_template_"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"input_ids": [5, 6]}, "input_ids"),
        ({"modalities": ["audio"]}, "modalities"),
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
    neutral["top_logprobs"] = 0
    assert _chat(server, **neutral)["choices"][0]["message"]["content"] == ANSWER


def test_a_refusal_is_a_status_even_when_streaming(server: Any) -> None:
    long = [{"role": "user", "content": "a " * 500}]
    reply = server.http.post("/v1/chat/completions", json={"messages": long, "stream": True})
    assert reply.status_code == 400
    assert "256" in reply.json()["message"]


def test_the_last_message_can_be_continued(server: Any) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    _chat(server, messages=begun, continue_final_message=True)
    ids = server.engine.requests[-1].prompt_ids
    text = server.door.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_ids_and_meta_info_come_on_request(server: Any) -> None:
    [choice] = _chat(server, return_token_ids=True, return_meta_info=True)["choices"]
    assert choice["token_ids"] == [*server.door.tokenizer.encode(ANSWER), 2]
    assert choice["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    [plain] = _chat(server)["choices"]
    assert not {"token_ids", "meta_info"} & set(plain)


def test_two_outputs_have_two_indices(server: Any) -> None:
    reply = _chat(server, n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
