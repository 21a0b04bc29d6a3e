# SPDX-License-Identifier: Apache-2.0
"""Control endpoints: abort, flush, pause and continue."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tetrarch.engine.actions import Continue, Pause

if TYPE_CHECKING:
    from conftest import ScriptedServer

ENDLESS = {"ignore_eos": True, "max_new_tokens": 100_000}


def start(server: ScriptedServer, pool: ThreadPoolExecutor, *rids: str) -> list[Any]:
    count = len(server.engine.requests)
    futures = [
        pool.submit(
            server.http.post,
            "/generate",
            json={"input_ids": [5], "rid": rid, "sampling_params": ENDLESS},
        )
        for rid in rids
    ]
    while len(server.engine.requests) < count + len(rids):
        time.sleep(0.005)
    time.sleep(0.02)
    return futures


def abort(server: ScriptedServer, body: Any) -> int:
    response = server.http.post("/abort_request", json=body)
    assert response.status_code == 200
    return response.json()["aborted"]


def test_abort_is_exact_unless_a_prefix_is_asked_for(server: ScriptedServer) -> None:
    with ThreadPoolExecutor() as pool:
        first, second, third, other = start(server, pool, "a", "ab", "abc", "z")
        assert abort(server, {"rid": "ab"}) == 1
        reply = second.result(5)
        assert reply.status_code == 200
        assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert not first.done()
        assert not third.done()
        assert abort(server, {"rid": "a", "prefix": True}) == 2
        assert not other.done()
        assert abort(server, {"abort_all": True}) == 1
        assert [f.result(5).status_code for f in (first, third, other)] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("n", "rid", "ended"), [(1, "job_0", [0]), (2, "job_1", [2, 3])])
def test_an_abort_of_one_prompt_of_a_completion_ends_its_choices_alone(
    server: ScriptedServer, n: int, rid: str, ended: list[int], stream: bool
) -> None:
    body = {"prompt": ["a", "b", "c"], "n": n, "rid": "job", "max_tokens": 64, "stream": stream}
    server.engine.pause = True
    with ThreadPoolExecutor() as pool:
        future = pool.submit(server.http.post, "/v1/completions", json=body)
        while server.client.num_pending < 3 * n:
            time.sleep(0.005)
        assert abort(server, {"rid": rid}) == n
        server.engine.pause = False
        reply = future.result(5)
    assert reply.status_code == 200
    if stream:
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    else:
        choices = reply.json()["choices"]
    reasons = {each["index"]: each["finish_reason"] for each in choices if each["finish_reason"]}
    assert reasons == {at: "abort" if at in ended else "stop" for at in range(3 * n)}
    assert {each["text"] for each in choices if each["index"] in ended} == {""}


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None, "prefix": True}, {"rid": "ghost"}])
def test_nobody_is_aborted_by_an_empty_or_unknown_id(server: ScriptedServer, body: Any) -> None:
    with ThreadPoolExecutor() as pool:
        [running] = start(server, pool, "alone")
        assert abort(server, body) == 0
        assert not running.done()
        assert abort(server, {"abort_all": True}) == 1


def test_a_missing_body_is_an_empty_one(server: ScriptedServer) -> None:
    assert server.http.post("/abort_request").json() == {"aborted": 0}


def test_flush_answers_in_text_or_json(server: ScriptedServer) -> None:
    for method in ("GET", "POST"):
        text = server.http.request(method, "/flush_cache")
        assert (text.status_code, text.text) == (200, "flushed\n")
    reply = server.http.get("/flush_cache", headers={"Accept": "application/json"})
    assert reply.json() == {"success": True, "message": "flushed"}


def test_flush_fails_while_requests_run(server: ScriptedServer) -> None:
    with ThreadPoolExecutor() as pool:
        start(server, pool, "busy")
        reply = server.http.get("/flush_cache", headers={"Accept": "application/json"})
        assert reply.status_code == 400
        assert reply.json() == {"success": False, "message": "requests are running"}
        abort(server, {"rid": "busy"})


@pytest.mark.parametrize("timeout", ["nan", "-1", "inf", "3601", "soon"])
def test_a_senseless_timeout_is_refused(server: ScriptedServer, timeout: str) -> None:
    reply = server.http.get(f"/flush_cache?timeout={timeout}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "timeout"
    assert "3600" in reply.json()["error"]["message"]


def test_pausing_has_three_modes_and_abort_is_the_default(asked: Any) -> None:
    for body, mode in ((None, "abort"), ({}, "abort"), ({"mode": None}, "abort")):
        reply, [action] = asked("/pause_generation", body, message="paused")
        assert reply.json() == {"success": True, "message": "paused", "status": "ok"}
        assert isinstance(action, Pause)
        assert action.mode == mode
    for mode in ("abort", "retract", "in_place"):
        _, [action] = asked("/pause_generation", {"mode": mode})
        assert action.mode == mode
    reply, actions = asked("/pause_generation", {"mode": "stop"})
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == "mode"


def test_continuing_takes_what_clients_send(asked: Any) -> None:
    for body in (None, {}, {"torch_empty_cache": True}):
        reply, [action] = asked("/continue_generation", body)
        assert reply.json() == {"success": True, "message": "", "status": "ok"}
        assert isinstance(action, Continue)
    reply, _ = asked("/continue_generation", ok=False, status=400, message="half a layer")
    assert reply.status_code == 400
    assert (reply.json()["success"], reply.json()["status"]) == (False, "error")
