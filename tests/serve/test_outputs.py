# SPDX-License-Identifier: Apache-2.0
"""Outputs as they grow, and what becomes of them when their client has gone."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tetrarch.engine.request import Delta, FinishReason, GenerateRequest, SamplingParams
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.outputs import Output

ANSWER = "The answer is 42. It is 42!"
UNICODE = "Ünïcode 🙂👩‍👧 → 日本 done"
EOS = 2

if TYPE_CHECKING:
    from conftest import ScriptedServer

ENDLESS = {"ignore_eos": True, "max_new_tokens": 100_000}


def test_a_piece_is_what_is_new(server: ScriptedServer) -> None:
    tokenizer = server.door.tokenizer
    request = GenerateRequest(rid="r", prompt_ids=(5,), sampling=SamplingParams())
    output, ids = Output(0, request, tokenizer), tokenizer.encode("one two three")
    texts: list[str] = []
    for token_id in ids:
        scored = TokenLogprob(token_id, -1.0, top=(), picked=())
        output.push(Delta(rid="r", token_ids=(token_id,), logprobs=(scored,)))
        piece = output.piece()
        assert piece.token_ids == [token_id]
        assert piece.logprobs == [scored]
        assert piece.is_first is (len(texts) == 0)
        texts.append(piece.text)
    output.push(Delta(rid="r", finish=FinishReason(kind="length", length=len(ids))))
    texts.append(output.piece().text)
    assert "".join(texts) == output.text == "one two three"
    assert output.token_ids == ids


def post(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@contextmanager
def connected(server: ScriptedServer, path: str, **body: Any) -> Iterator[socket.socket]:
    """A client that has sent a request, and hangs up at the end."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(post(path, body))
        yield connection


def wait(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 5
        time.sleep(0.002)
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [[5], [6]], "sampling_params": ENDLESS}),
        ("/v1/completions", {"prompt": "a", "ignore_eos": True, "max_tokens": 100_000, "n": 2}),
    ],
)
def test_a_client_that_hangs_up_is_noticed_and_leaves_nothing(
    server: ScriptedServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    count = len(server.engine.aborts)
    with connected(server, path, **body, stream=stream):
        wait(lambda: server.client.num_pending == 2)
    assert wait(lambda: len(server.engine.aborts) == count + 2) < 0.5
    assert server.client.num_pending == 0
    assert all(abort.quiet for abort in server.engine.aborts[count:])


def test_a_queued_request_is_dropped_too(server: ScriptedServer) -> None:
    server.engine.pause = True
    with connected(server, "/generate", text="a", rid="gone", stream=True):
        wait(lambda: server.client.num_pending == 1)
    assert wait(lambda: server.client.num_pending == 0) < 0.5
    server.engine.pause = False
    wait(lambda: server.engine.aborts[-1].rid == "gone")


NAN = FinishReason(kind="abort", message="logits are NaN", status=500, code="nan_logits")


@pytest.fixture
def failing(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Every output fails but the second prompt's."""
    server.engine.refuse_with, server.engine.spared = NAN, {"r_1"}
    yield server
    server.engine.refuse_with, server.engine.spared = None, set()
    assert server.client.num_pending == 0


@pytest.mark.parametrize("body", [{"text": "a"}, {"text": ["a", "b"]}])
def test_a_request_whose_outputs_all_fail_does_so_with_one_line_in_the_log(
    failing: ScriptedServer, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reply = failing.http.post("/generate", json=body)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "logits are NaN"
    assert reply.json()["error"]["type"] == "nan_logits"
    records = [record for record in caplog.records if record.name.startswith("tetrarch")]
    assert [record.levelname for record in records] == ["WARNING"] * len(list(body["text"]))
    assert not any(record.exc_info for record in records)


def test_an_output_that_fails_leaves_the_rest_of_its_batch_alone(failing: ScriptedServer) -> None:
    reply = failing.http.post("/generate", json={"text": ["a", "b", "c"], "rid": "r"})
    assert reply.status_code == 200
    first, second, third = reply.json()
    assert second["text"] == ANSWER
    assert second["meta_info"]["finish_reason"]["type"] == "stop"
    for row in (first, third):
        assert row["text"] == ""
        assert row["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "logits are NaN",
            "status_code": 500,
            "err_type": "nan_logits",
        }


def test_an_output_that_fails_leaves_the_rest_of_its_stream_alone(failing: ScriptedServer) -> None:
    body = {"text": ["a", "b"], "rid": "r", "stream": True}
    with failing.http.stream("POST", "/generate", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    [failed] = [event for event in events if event["index"] == 0]
    assert failed["meta_info"]["finish_reason"]["err_type"] == "nan_logits"
    assert events[-1]["text"] == ANSWER


WHY = {"message": "logits are NaN", "type": "nan_logits", "param": None, "code": 500}


def test_a_failed_choice_of_a_completion_says_abort_and_why(failing: ScriptedServer) -> None:
    body = {"prompt": ["a", "b"], "rid": "r", "max_tokens": 64}
    choices = failing.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "stop"]
    assert (choices[0]["error"], "error" in choices[1]) == (WHY, False)
    assert choices[1]["text"] == ANSWER


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_choice_that_failed_says_why_in_every_body(
    failing: ScriptedServer, path: str, body: Any, is_stream: bool
) -> None:
    body = {**body, "rid": "r", "max_tokens": 64, "stream": is_stream}
    text = failing.http.post(path, json=body).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    replies = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for reply in replies for choice in reply["choices"]]
    assert [(one["index"], one["error"]) for one in choices if "error" in one] == [(0, WHY)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_what_cannot_run_now_is_told_to_come_again(
    server: ScriptedServer, path: str, is_stream: bool
) -> None:
    server.engine.refuse_with = FinishReason(
        kind="abort", message="weights are lent", status=503, code="weights_released"
    )
    prompts = {"text": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    reply = server.http.post(path, json={**prompts, "stream": is_stream})
    server.engine.refuse_with = None
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    error = reply.json() if path.startswith("/v1/") else reply.json()["error"]
    assert error["type"] == "weights_released"
    assert error["code"] == 503
    assert error["message"] == "weights are lent"


def text_of(path: str, piece: Any) -> str:
    """The text that an answer or event holds."""
    if path == "/generate":
        return piece["text"]
    [choice] = piece["choices"]
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", ["ï", "🙂", "👩‍👧", "🙂👩", "\u200d", "→ 日", "本 d", "日本語"])
def test_a_stop_string_of_several_tokens_ends_the_text_at_every_door(
    server: ScriptedServer, path: str, stop: str, stream: bool
) -> None:
    """The tokenizer has 1024 tokens: each of these characters takes several."""
    server.engine.answer = UNICODE
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    sampling = {"stop": [stop], "max_new_tokens": 99}
    body = {**prompt, "text": "a", "stop": [stop], "max_tokens": 99, "sampling_params": sampling}
    if path == "/generate":
        body["incremental"] = True
    reply = server.http.post(path, json={**body, "stream": stream})
    server.engine.answer = ANSWER
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    pieces = [text_of(path, json.loads(line)) for line in lines if line != "[DONE]"]
    assert "".join(pieces) == UNICODE.partition(stop)[0]
    key = "matched" if path == "/generate" else "matched_stop"
    matched = json.dumps(stop if stop in UNICODE else EOS, ensure_ascii=False)
    assert f'"{key}":{matched}' in reply.text


def test_death_ends_a_stream_with_an_error_event(fresh_server: ScriptedServer) -> None:
    fresh_server.make_ready()
    body = {"text": "a", "stream": True, "sampling_params": ENDLESS}
    with fresh_server.http.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["output_ids"]
        fresh_server.engine.die()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
    late = fresh_server.http.post("/generate", json={"text": "a"})
    assert late.status_code == 503
    assert late.headers["retry-after"] == "5"
