# SPDX-License-Identifier: Apache-2.0
"""Every kind of failure has one answer, in the shape of its door."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tetrarch.engine.request import FinishReason


@pytest.mark.parametrize("content", [b"{", b'{"text": NaN}', b'{"text": "\xff"}', b"[]", b"3"])
def test_bytes_that_are_no_request_are_400(server: Any, content: bytes) -> None:
    native = server.http.post("/generate", content=content)
    assert native.status_code == 400
    assert set(native.json()["error"]) >= {"message", "type", "code"}
    flat = server.http.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert flat.status_code == 400
    assert flat.json()["object"] == "error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
    ],
)
def test_every_byte_of_a_stream_belongs_to_an_event(
    server: Any, path: str, body: dict[str, Any]
) -> None:
    """Clients feed every line to a JSON parser: no comment, no ping, no other field."""
    reply = server.http.post(path, json={**body, "stream": True})
    assert re.fullmatch(r"(data: \{[^\n]+\}\n\n)+data: \[DONE\]\n\n", reply.text), reply.text


def test_a_refusal_of_the_engine_keeps_its_status(server: Any) -> None:
    server.engine.refuse_with = FinishReason(
        kind="abort", message="logits are not finite", status=500, code="nan_logits"
    )
    try:
        reply = server.http.post("/generate", json={"text": "a"})
    finally:
        server.engine.refuse_with = None
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]


def test_without_an_engine_everything_is_503_at_once(fresh_server: Any) -> None:
    for path in ("/generate", "/v1/completions"):
        reply = fresh_server.http.post(path, json={"text": "a", "prompt": "a"})
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0


def test_a_bug_is_a_500_with_a_body_and_the_server_goes_on(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(type(server.door.tokenizer), "encode", defect)
        reply = server.http.post("/tokenize", json={"prompt": "a"})
    assert reply.status_code == 500
    assert "ZeroDivisionError" in reply.json()["error"]["message"]
    # On another connection: uvicorn closes the one that the defect came through.
    again = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"})
    assert again.status_code == 200


def test_a_path_of_slashes_is_no_crash(server: Any) -> None:
    assert server.http.get("///").status_code == 404
    assert server.http.get("/health///").status_code == 200
