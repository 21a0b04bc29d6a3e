# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions`: the shapes, offsets and indices that evaluation harnesses rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest

ANSWER = "The answer is 42. It is 42!"


def _complete(server: Any, **body: Any) -> Any:
    reply = server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 64, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def _events(server: Any, **body: Any) -> list[Any]:
    body = {"prompt": "Hi", "max_tokens": 64, "stream": True, **body}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _logprob(token_id: int) -> float:
    return -0.5 - token_id / 1024


def test_a_completion_is_text_with_usage(server: Any) -> None:
    reply = _complete(server, model="any-name")
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == (ANSWER, "stop", 2)
    assert (reply["object"], reply["model"]) == ("text_completion", "any-name")
    usage = reply["usage"]
    count = len(server.door.tokenizer.encode(ANSWER)) + 1
    assert usage["completion_tokens"] == count
    assert usage["total_tokens"] == usage["prompt_tokens"] + count
    assert reply["metadata"] == {"weight_version": "v7"}


def test_a_stream_joins_to_the_same_text_and_counts_only_when_asked(server: Any) -> None:
    events = _events(server)
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
    assert all(event["usage"] is None and event["object"] == "text_completion" for event in events)
    *pieces, last = _events(server, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(piece["usage"] is None for piece in pieces)
    counted = _events(server, stream_options={"continuous_usage_stats": True})
    totals = [event["usage"]["completion_tokens"] for event in counted]
    assert totals == sorted(totals)
    assert totals[-1] == last["usage"]["completion_tokens"]


def test_indices_are_prompt_major_and_unique(server: Any) -> None:
    reply = _complete(server, prompt=[[5, 6], [7, 8], [9]], n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    sent = server.engine.requests[-6:]
    assert [request.prompt_ids for request in sent] == [(5, 6)] * 2 + [(7, 8)] * 2 + [(9,)] * 2
    assert reply["usage"]["prompt_tokens"] == 5  # a prompt counts once


def test_echo_scores_the_prompt_as_harnesses_read_it(server: Any) -> None:
    """lm-eval: length prompt + 1, first entry null, text offsets real, top-1 the same float."""
    ids = server.door.tokenizer.encode("What is 2 + 3?")
    [choice] = _complete(server, prompt=[ids], echo=True, logprobs=1, max_tokens=1)["choices"]
    scores = choice["logprobs"]
    assert len(scores["token_logprobs"]) == len(ids) + 1
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1 : len(ids)] == [_logprob(token_id) for token_id in ids[1:]]
    for logprob, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
        assert logprob == max(top.values())
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_echo_without_new_tokens_and_without_alternatives(server: Any) -> None:
    ids = server.door.tokenizer.encode("What is 2 + 3?")
    [choice] = _complete(server, prompt=[ids], echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["text"] == "What is 2 + 3?"
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert all(not top for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_offsets_count_the_characters_that_are_echoed(server: Any, as_ids: bool) -> None:
    """Special tokens that a text spells out are echoed, those among ids are not."""
    text = "<|im_start|>user\nIs ☃ 2?<|im_end|>"
    prompt = server.door.tokenizer.encode(text) if as_ids else text
    [choice] = _complete(server, prompt=prompt, echo=True, logprobs=0)["choices"]
    shown = "user\nIs ☃ 2?" if as_ids else text
    assert choice["text"] == shown + ANSWER
    scores = choice["logprobs"]
    assert "<|im_end|>" in scores["tokens"]
    count = len(server.door.tokenizer.encode(text))
    assert scores["text_offset"][0] == 0
    assert scores["text_offset"][count] == len(shown)
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        special = token.startswith("<|")
        if not (special and as_ids) and "\ufffd" not in token and offset < len(choice["text"]):
            assert choice["text"][offset : offset + len(token)] == token


def test_a_streamed_echo_comes_once_for_each_output(server: Any) -> None:
    events = _events(server, prompt=["One", "Two"], n=2, echo=True, logprobs=0, max_tokens=3)
    pieces: dict[int, list[Any]] = {}
    for event in events:
        [choice] = event["choices"]
        pieces.setdefault(choice["index"], []).append(choice)
    assert sorted(pieces) == [0, 1, 2, 3]
    whole = _complete(server, prompt=["One", "Two"], n=2, echo=True, logprobs=0, max_tokens=3)
    for choice in whole["choices"]:
        parts = pieces[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert choice["text"].startswith(["One", "Two"][choice["index"] // 2])
        for key, values in choice["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][key]] == values


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_of_a_prompt_that_was_cut_only_what_the_model_read_is_echoed(
    lenient_server: Any, as_ids: bool, stream: bool
) -> None:
    text = "<|im_start|>user\n" + "Is ☃ 2? " * 200
    ids = lenient_server.door.tokenizer.encode(text)
    read = ids[:255]  # of a context of 256 tokens
    shown = lenient_server.door.tokenizer.decode(read, skip_special_tokens=as_ids)
    assert as_ids or text.startswith(shown.rstrip("\ufffd"))
    body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 0, "max_tokens": 1}
    if stream:
        pieces = [event["choices"][0] for event in _events(lenient_server, **body)]
    else:
        pieces = _complete(lenient_server, **body)["choices"]
    first = lenient_server.door.tokenizer.encode(ANSWER)[0]
    assert "".join(piece["text"] for piece in pieces) == shown + "The"
    scores = {key: [] for key in pieces[0]["logprobs"]}
    for piece in pieces:
        for key, values in piece["logprobs"].items():
            scores[key] += values
    assert [len(values) for values in scores.values()] == [256] * 4
    assert scores["token_logprobs"] == [None, *map(_logprob, [*read[1:], first])]
    assert scores["text_offset"][255] == len(shown)


def test_without_echo_the_prompt_is_neither_shown_nor_scored(server: Any) -> None:
    [choice] = _complete(server, prompt="Two words", logprobs=2, max_tokens=4)["choices"]
    assert ANSWER.startswith(choice["text"])
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert choice["logprobs"]["text_offset"][0] == 0
    assert server.engine.requests[-1].logprob_start == -1


def test_a_stop_string_is_cut_off_and_named(server: Any) -> None:
    [choice] = _complete(server, stop=[". It"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The answer is 42", "stop")
    assert choice["matched_stop"] == ". It"


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 0}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1024]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"input_ids": [5, 6]}, "input_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"prompt": [[5] * 300]}, "300"),
    ],
)
def test_a_bad_request_is_400_and_names_the_key(
    server: Any, body: dict[str, Any], key: str
) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": "Hi", **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert (error["object"], error["code"]) == ("error", 400)
    assert key in error["message"] or key == error["param"]


def test_nulls_and_neutral_values_ask_for_nothing(server: Any) -> None:
    neutral = {"stop": None, "logprobs": None, "best_of": 1, "suffix": None, "user": "me"}
    assert _complete(server, **neutral)["choices"][0]["text"] == ANSWER


def test_the_body_must_be_called_json(server: Any) -> None:
    text = server.http.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}
    )
    assert text.status_code == 400
    charset = server.http.post(
        "/v1/completions",
        content=b'{"prompt": "a"}',
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert charset.status_code == 200
