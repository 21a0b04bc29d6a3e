# SPDX-License-Identifier: Apache-2.0
"""Bodies are read strictly, and refusals name the key."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
import pytest
from starlette.requests import Request

from tetrarch.core.errors import RequestError
from tetrarch.serve.body import json_response, read_body, read_control


class Thing(msgspec.Struct, kw_only=True):
    size: int | None = None
    names: list[str] = []


class Needy(msgspec.Struct):
    prompt: str


def post(body: bytes, *, path: str = "/generate", type_: str = "", query: bytes = b"") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", type_.encode())] if type_ else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    scope |= {"query_string": query, "server": ("x", 80), "scheme": "http"}
    return Request(scope, receive)


def read(body: bytes, kind: type = Thing, *, path: str = "/generate", type_: str = "") -> Any:
    request = post(body, path=path, type_=type_)
    return asyncio.run(read_body(request, kind, later=frozenset({"tools"})))


def test_a_missing_body_is_an_empty_object() -> None:
    assert read(b"") == read(b" \n") == read(b"{}") == Thing()


def test_unknown_keys_and_nulls_are_accepted() -> None:
    assert read(b'{"size": null, "who": {"knows": [1e9]}}') == Thing()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"NaN",
        b'{"x": NaN}',
        b'{"x": -Infinity}',
        b'{"x": 1e400}',
        b'{"size": 18446744073709551616}',
        b'{"x": [{"y": -9223372036854775809000}]}',
        b'{"x": "\xff"}',
        b"\xff\xfe{}",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b"[]",
        b'"text"',
        b"7",
        b"null",
    ],
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read(body)


def test_64_bits_are_accepted() -> None:
    assert read(b'{"size": 9223372036854775807}').size == 2**63 - 1
    assert read(b'{"x": "12345678901234567890123"}') == Thing()  # digits in a text are text


@pytest.mark.parametrize(
    ("body", "kind", "key"),
    [
        (b'{"size": "7"}', Thing, "size"),
        (b'{"size": true}', Thing, "size"),
        (b'{"names": ["a", 1]}', Thing, "names"),
        (b"{}", Needy, "prompt"),
        (b'{"tools": [{}]}', Thing, "tools"),
    ],
)
def test_a_refusal_names_the_key(body: bytes, kind: type, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(body, kind)
    assert caught.value.param == key
    assert key in str(caught.value)


def test_a_value_that_is_none_of_a_few_is_told_those() -> None:
    class Choosy(msgspec.Struct):
        mode: Literal["fast", "slow"] | None = None

    for body, query in ((b'{"mode": "medium"}', b""), (b"", b"mode=medium")):
        with pytest.raises(RequestError) as caught:
            asyncio.run(read_control(post(body, query=query), Choosy))
        error = caught.value
        assert (error.what, error.param) == ("mode is none of its values", "mode")
        assert "'medium'" in error.why
        assert error.fix == 'send "fast" or "slow"'


@pytest.mark.parametrize("type_", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_openai_endpoints_insist_on_json(type_: str) -> None:
    assert read(b"{}", type_=type_) == Thing()  # native endpoints do not
    with pytest.raises(RequestError, match="content type"):
        read(b"{}", path="/v1/completions", type_=type_)


@pytest.mark.parametrize("type_", ["application/json", "Application/JSON; charset=utf-8"])
def test_content_type_parameters_are_tolerated(type_: str) -> None:
    assert read(b"{}", path="/v1/completions", type_=type_) == Thing()


def test_answers_are_json() -> None:
    response = json_response(Thing(size=3), status=400)
    assert (response.status_code, bytes(response.body)) == (400, b'{"size":3,"names":[]}')


def control(body: bytes, query: bytes = b"") -> Thing:
    return asyncio.run(read_control(post(body, query=query), Thing))


def test_a_query_adds_to_the_body_of_a_control_endpoint() -> None:
    assert control(b"") == Thing()
    assert control(b"", b"size=5&more=1") == Thing(size=5)
    assert control(b'{"names": ["a"]}', b"size=5") == Thing(size=5, names=["a"])
    assert control(b'{"size": 7}', b"size=5") == Thing(size=7)
    long = b"size=" + b"9" * 30
    for body, query in ((b"", b"size=many"), (b"[]", b"size=5"), (b"{", b"size=5"), (b"", long)):
        with pytest.raises(RequestError):
            control(body, query)
    with pytest.raises(RequestError):  # text is a number only where there is a query
        control(b'{"size": "5"}')
