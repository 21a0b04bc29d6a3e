# SPDX-License-Identifier: Apache-2.0
"""A body that is too large is refused in the shape of its door, and the server goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import ScriptedServer

LIMIT = 1000


def padded(size: int) -> bytes:
    """A request of exactly `size` bytes."""
    body = b'{"prompt": "a", "text": "a", "max_tokens": 1}'
    return body + b" " * (size - len(body))


def chunks(size: int) -> Iterator[bytes]:
    """The same without a declared length."""
    body = padded(size)
    yield from (body[at : at + 300] for at in range(0, size, 300))


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("make", [padded, chunks])
@pytest.mark.parametrize(
    ("path", "flat"), [("/generate", False), ("/v1/completions", True), ("/tokenize", False)]
)
def test_a_body_that_is_too_large_is_413_and_one_that_just_fits_is_read(
    limited_server: ScriptedServer, make: Any, path: str, flat: bool
) -> None:
    http = limited_server.http
    reply = http.post(path, content=make(LIMIT + 1), headers=JSON)
    assert reply.status_code == 413
    error = reply.json() if flat else reply.json()["error"]
    assert (error["code"], error["type"]) == (413, "PayloadTooLargeError")
    assert "1000 bytes" in error["message"]
    assert "--max-body-bytes" in error["message"]
    assert (error.get("object") == "error") is flat
    assert http.post(path, content=make(LIMIT), headers=JSON).status_code == 200


def test_tensors_have_a_bound_of_their_own(limited_server: ScriptedServer) -> None:
    body = {"serialized_named_tensors": ["QUFB" * 1000]}
    reply = limited_server.http.post("/update_weights_from_tensor", json=body)
    assert reply.status_code == 200
    [action] = limited_server.engine.actions
    assert action.data == b"AAA" * 1000
    assert limited_server.http.post("/update_weights_from_disk", json=body).status_code == 413
    head = f"POST /update_weights_from_tensor HTTP/1.1\r\nHost: x\r\nContent-Length: {6 << 30}"
    host, port = limited_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_it_all_before_it_reads_gets_its_answer(
    limited_server: ScriptedServer,
) -> None:
    """20 MB are more than the sockets hold: the server must take them off the wire."""
    host, port = limited_server.url.removeprefix("http://").split(":")
    size = 20_000_000
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + b" " * size)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200 " in connection.recv(1000)


def test_a_client_that_asks_first_need_not_send_it(limited_server: ScriptedServer) -> None:
    host, port = limited_server.url.removeprefix("http://").split(":")
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\nExpect: 100-continue"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
