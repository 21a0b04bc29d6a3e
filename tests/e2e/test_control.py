# SPDX-License-Identifier: Apache-2.0
"""Control endpoints in every order, and with every nonsense: nobody is hurt."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tetrarch.serve.routes import ROUTES, Access

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from conftest import TrainedServer

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
ORDERS = (
    "-* -* +*",
    "+* -* +*",
    "-w +w +w",
    "-k +k -k +k",
    "-k -w +w +k",
    "-w -k -g +g +k +w",
    "+w -w -w +k +w",
    "-g +g +g",
    "-x -w +x +w",
    "-* +w +k +g",
    "-* +g +k +w +*",
    "-kw +* -kw +wk",
)
TAGS = {"w": "weights", "k": "kv_cache", "g": "cuda_graph", "x": "vram"}


@pytest.mark.parametrize("order", ORDERS)
def test_memory_may_be_released_and_resumed_in_any_order(
    trained: TrainedServer, order: str, demo_path: Path
) -> None:
    is_there = dict.fromkeys("wkg", True)
    for move in order.split():
        path = RELEASE if move[0] == "-" else RESUME
        letters = "wkg" if move[1:] == "*" else move[1:]
        body = None if move[1:] == "*" else {"tags": [TAGS[letter] for letter in letters]}
        reply = trained.http.post(path, json=body)
        assert reply.status_code == (400 if "x" in letters else 200), reply.text
        if "x" in letters:
            continue
        is_there |= dict.fromkeys(letters, move[0] == "+")
        states = {
            TAGS[each]: "resident" if there else "released" for each, there in is_there.items()
        }
        assert reply.json()["state"] == states
    assert all(is_there.values())
    trained.load_from(demo_path)


def test_memory_is_not_taken_from_under_a_request(trained: TrainedServer) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    body = {"input_ids": [5], "sampling_params": sampling, "stream": True}
    with trained.http.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert "running" in trained.ask(RELEASE, status=400)["message"]
        trained.ask(RELEASE, wait_s=60, tags=["kv_cache"])  # answers once the request has ended
        assert '"type":"length"' in [line for line in lines if line][-2]
    assert trained.reason() == "kv_released"


VALID: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "/no/such/folder"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gASVAA=="], "flush_cache": False},
    "/update_weights_from_distributed": {
        "names": ["model.norm.weight"],
        "dtypes": ["bfloat16"],
        "shapes": [[256]],
        "group_name": "nobody's",
    },
    "/init_weights_update_group": {  # twice wrong: nobody waits for a trainer that never comes
        "master_address": "127.0.0.1",
        "master_port": 0,
        "rank_offset": 65535,
        "world_size": 2,
    },
    "/get_weights_by_name": {"name": "model.norm.weight"},
    "/weights_checker": {"action": "compare"},
    "/update_weight_version": {"new_version": "v"},
}
WRONG: Sequence[Any] = (
    *("", "text", "weights", "\0", "../../etc", "\ud7ff", "9" * 30),
    *(0, 1, 7, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, 1e308, -0.0),
    *(True, False, None),
    *([], [[]], [None], ["a", 5], [[[5]]], [2**63], [[2**62, 2**62]], ["weights"] * 100),
    *({}, {"a": {"b": []}}, {"0": None}),
)
RAW = (
    *(b"", b"null", b"[]", b"1", b'"text"', b"{", b'{"a":', b"text=a&b=c", b"\x00" * 64),
    *(b'{"wait_s": NaN}', b'{"wait_s": Infinity}', b'{"tags": "\xff"}', b'{"name": "\\ud800"}'),
    *(b"[" * 100_000, b'{"master_port": ' + b"9" * 400 + b"}", b'{"a":' * 900 + b"1" + b"}" * 900),
)
CONTROL = [
    (method, path, route.body)
    for route in ROUTES
    for path in route.paths
    for method in route.methods
    if route.access is Access.CONTROL
]


def attempt(server: TrainedServer, chance: random.Random) -> httpx.Response:
    """Send one malformed body to a control endpoint."""
    method, path, kind = chance.choice(CONTROL)
    query = chance.choice(
        ("", "", "", "?timeout=nan", "?tags=%00", "?wait_s=x&name=&name=b", "?=&&")
    )
    if kind is None or chance.random() < 0.2:
        return server.http.request(method, path + query, content=chance.choice(RAW))
    fields = (*kind.__struct_fields__, "nonsense")
    spoilt = {chance.choice(fields): chance.choice(WRONG) for _ in range(chance.randint(1, 3))}
    body = json.dumps({**VALID.get(path, {}), **spoilt})
    return server.http.request(method, path + query, content=body)


def test_a_thousand_malformed_bodies_are_answered(trained: TrainedServer, demo_path: Path) -> None:
    chance = random.Random(20261130)
    for _ in range(1000):
        reply = attempt(trained, chance)
        status, sent = reply.status_code, reply.request.content[:200]
        what = f"{reply.request.method} {reply.request.url}: {sent!r}: {reply.text[:500]}"
        assert 200 <= status < 300 or 400 <= status < 500 or status == 503, what
        assert status != 422, what
        if status >= 400 and reply.request.url.path != "/flush_cache":
            error = reply.json()["error"]
            assert error["message"], what
            assert error["code"] == status, what
    assert trained.http.get("/health").status_code == 200
    trained.http.post("/end_weight_update")
    trained.ask(RESUME)
    trained.load_from(demo_path)
    trained.ask("/continue_generation")
    assert trained.bits()[0]
