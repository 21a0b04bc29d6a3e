# SPDX-License-Identifier: Apache-2.0
"""Nonsense for every endpoint: refused or answered, in the right shape, and nobody is hurt."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tetrarch.serve.routes import ROUTES, Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from conftest import RunningServer

JSON = "application/json"
ENDPOINTS = [
    (method, path.replace("{name:path}", "some/name"), route.body)
    for route in ROUTES
    for path in route.paths
    for method in route.methods
    # Control endpoints that an empty body sets off are test_control.py's, on a server of its own.
    if route.access is not Access.CONTROL or path in ("/flush_cache", "/abort_request")
]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "1", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1},
    "/generate": {"text": "1", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "1"},
    "/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "nobody"},
}
WRONG: list[Any] = [
    "text",
    "",
    7,
    -1,
    0,
    2**63,
    2**64 - 1,
    -(2**63),
    1e308,
    True,
    [],
    {},
    [[]],
    [[[5]]],
    ["a", 5],
    [None],
    {"a": {"b": []}},
]
BODIES: list[tuple[str, bytes | None]] = [
    ("none", None),
    ("empty object", b"{}"),
    ("null", b"null"),
    ("list", b"[]"),
    ("number", b"1"),
    ("text", b'"text"'),
    ("cut off", b'{"text": "a'),
    ("not json", b"text=a&b=c"),
    ("nan", b'{"temperature": NaN, "sampling_params": {"temperature": NaN}}'),
    ("infinity", b'{"prompt": "a", "text": "a", "temperature": Infinity}'),
    ("too large a float", b'{"temperature": 1e999, "sampling_params": {"temperature": 1e999}}'),
    ("too large an integer", b'{"n": ' + b"9" * 400 + b"}"),
    ("unknown keys", b'{"nonsense": 1, "more": {"of": ["it"]}}'),
    ("bytes that are no text", b'{"text": "\xff\xfe\x80", "prompt": "\xc3\x28"}'),
    ("half a surrogate", b'{"text": "\\ud800", "prompt": "\\ud800"}'),
    ("zero bytes", b"\x00" * 64),
    ("a deep list", b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"),
    ("a deeper list", b"[" * 100_000 + b"]" * 100_000),
    ("deep objects", b'{"a":' * 900 + b"1" + b"}" * 900),
    (
        "deep parameters",
        b'{"text":"a","sampling_params":{"stop":' + b"[" * 900 + b"]" * 900 + b"}}",
    ),
]


@pytest.fixture(autouse=True)
def survives(server: RunningServer) -> Iterator[None]:
    """After each test the server still counts to eight, and nothing runs."""
    yield
    assert server.http.get("/health").status_code == 200
    server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=5)
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    reply = server.generate(input_ids=[5, 6, 7], sampling_params=sampling)
    assert reply["text"] == " bake 00 cakes. What is"


def check(response: httpx.Response, what: str) -> None:
    """2xx, 4xx or 503; a refusal is JSON in the shape of its path."""
    status, path = response.status_code, response.request.url.path
    assert 200 <= status < 300 or 400 <= status < 500 or status == 503, f"{what}: {response.text}"
    assert status != 422, what
    if status < 400 or response.request.method == "HEAD":
        return
    error = response.json()
    if not path.startswith("/v1/") or path.startswith("/v1/models/"):
        error = error["error"]
    assert isinstance(error["message"], str), what
    assert error["message"], what
    assert error["type"], what
    assert error["code"] in (status, "model_not_found"), what
    assert "param" in error, what


NO_JSON = {"cut off", "not json", "nan", "infinity", "too large an integer", "zero bytes"}
NO_JSON |= {"bytes that are no text", "half a surrogate", "a deeper list"}


@pytest.mark.parametrize("path", sorted(VALID))
def test_what_is_no_json_is_refused(server: RunningServer, path: str) -> None:
    for name, content in BODIES:
        if name in NO_JSON:
            reply = server.http.post(path, content=content, headers={"Content-Type": JSON})
            assert reply.status_code == 400, name
            check(reply, name)


@pytest.mark.parametrize(("method", "path"), [row[:2] for row in ENDPOINTS])
@pytest.mark.parametrize("content_type", [JSON, None])
def test_no_body_breaks_an_endpoint(
    server: RunningServer, method: str, path: str, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    for name, content in BODIES:
        check(server.http.request(method, path, content=content, headers=headers), name)


FIELDS = [
    (path, field, body)
    for _, path, kind in ENDPOINTS
    if kind is not None and (body := VALID.get(path)) is not None
    for field in kind.__struct_fields__
]


@pytest.mark.parametrize("path", sorted(VALID))
def test_no_field_breaks_an_endpoint(server: RunningServer, path: str) -> None:
    fields = {field for other, field, _ in FIELDS if other == path} - {"stream"}
    assert fields
    for field in sorted(fields):
        for value in WRONG:
            body = {**VALID[path], field: value}
            check(server.http.post(path, json=body), f"{field}={value!r}")


def test_no_sampling_parameter_breaks_generate(server: RunningServer) -> None:
    message = server.http.post("/generate", json={"text": "1", "sampling_params": {"no": 1}}).text
    names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)*\b", message)) & {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "sampling_seed",
        "stream_interval",
        "min_new_tokens",
        "repetition_penalty",
        "frequency_penalty",
    }
    assert len(names) == 12
    for name in sorted(names):
        for value in [*WRONG, {"5": 2**63}, {"x": 1}, ["a"] * 33, [2**64 - 1]]:
            sampling = {"max_new_tokens": 1, name: value}
            body = {"text": "1", "sampling_params": sampling}
            check(server.http.post("/generate", json=body), f"{name}={value!r}")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_v1_wants_json_and_says_so(server: RunningServer, path: str) -> None:
    body = json.dumps(VALID.get(path, {})).encode()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = server.http.post(path, content=body, headers={"Content-Type": content_type})
        assert reply.status_code == (405 if path == "/v1/models" else 400)
        check(reply, content_type)
    if path != "/v1/models":
        headers = {"Content-Type": "application/json; charset=utf-8"}
        assert server.http.post(path, content=body, headers=headers).status_code == 200


def test_odd_paths_and_methods_are_refused(server: RunningServer) -> None:
    for path in ("/nowhere", "/v1/nowhere", "/%ff%fe", "/generate/../x", "//", "/v1/models/%00"):
        reply = server.http.get(path)
        assert reply.status_code in (404, 405)
        check(reply, path)
    for method in ("DELETE", "PATCH", "OPTIONS", "TRACE"):
        check(server.http.request(method, "/generate"), method)
    for timeout in ("nan", "%ff", "1" * 500, "-0.1", "1e400"):
        reply = server.http.get(f"/flush_cache?timeout={timeout}")
        assert reply.status_code == 400
        check(reply, timeout)
