# SPDX-License-Identifier: Apache-2.0
"""Health, load and metrics."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tetrarch.engine.request import FinishReason
from tetrarch.serve import probes

if TYPE_CHECKING:
    from conftest import ScriptedServer

PATHS = ("/health", "/ready", "/ping", "/health_generate")


def statuses(server: ScriptedServer) -> set[int]:
    return {server.http.get(path).status_code for path in PATHS}


def test_health_follows_the_engines_life(fresh_server: ScriptedServer) -> None:
    server = fresh_server
    assert statuses(server) == {503}
    assert server.http.get("/health").headers["retry-after"] == "5"
    server.make_ready()
    assert statuses(server) == {200}
    server.engine.die()
    time.sleep(0.1)
    assert statuses(server) == {503}


def test_a_stopping_server_is_not_healthy(fresh_server: ScriptedServer) -> None:
    fresh_server.make_ready()
    fresh_server.call(fresh_server.client.stop)
    assert statuses(fresh_server) == {503}


def test_the_probe_is_one_greedy_token_marked_as_such(server: ScriptedServer) -> None:
    assert server.http.get("/health_generate").status_code == 200
    probe = server.engine.requests[-1]
    assert probe.rid.startswith("HEALTH_CHECK_")
    assert probe.prompt_ids == (0,)
    assert probe.sampling.max_new_tokens == 1
    assert probe.is_probe


def test_a_stuck_engine_fails_the_probe_only(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.2)
    server.engine.pause = True
    assert server.http.get("/health_generate").status_code == 503
    assert server.http.get("/health").status_code == 200
    deadline = time.monotonic() + 5
    while server.client.num_pending:  # the probe leaves nothing behind
        assert time.monotonic() < deadline
        time.sleep(0.005)
    server.engine.pause = False
    assert server.http.get("/health_generate").status_code == 200


def test_a_failing_forward_fails_the_probe_at_once(server: ScriptedServer) -> None:
    server.engine.refuse_with = FinishReason(kind="abort", status=500, code="nan_logits")
    began = time.monotonic()
    assert server.http.get("/health_generate").status_code == 503
    assert time.monotonic() - began < 2
    server.engine.refuse_with = None


@pytest.mark.parametrize(
    "code",
    [
        *("weights_inconsistent", "weights_released", "weights_not_loaded", "kv_released"),
        *("paused", "updating"),
    ],
)
def test_an_engine_that_runs_nothing_lives_and_says_why(server: ScriptedServer, code: str) -> None:
    is_paused, is_updating = code == "paused", code == "updating"
    state = "ready" if is_paused or is_updating else code
    server.told(state=state, is_paused=is_paused, is_updating=is_updating, num_paused=2)
    count = len(server.engine.requests)
    assert {server.http.get(path).status_code for path in ("/health", "/ping")} == {200}
    for path in ("/health_generate", "/ready"):
        reply = server.http.get(path)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert reply.json()["error"]["type"] == code
    assert len(server.engine.requests) == count  # no probe waits in its queue
    [entry] = server.http.get("/v1/loads").json()["loads"]
    assert (entry["num_paused_reqs"], entry["state"]) == (2, code)
    assert (
        'sglang:num_paused_reqs{model_name="tetrarch-demo"} 2.0' in server.http.get("/metrics").text
    )
    server.told(state="ready", is_paused=False, is_updating=False, num_paused=0)
    assert statuses(server) == {200}
    assert server.http.get("/v1/loads").json()["loads"][0]["state"] == "ready"


def test_load_counts_what_was_sent_a_moment_ago(server: ScriptedServer) -> None:
    body = {"input_ids": [5], "rid": "w", "sampling_params": {"max_new_tokens": 3}}
    server.http.get("/health_generate")
    idle = server.http.get("/v1/loads?include=core").json()
    assert idle["dp_rank_count"] == 1
    assert idle["loads"][0]["num_total_reqs"] == 0
    assert idle["loads"][0]["max_total_num_tokens"] == 4096
    server.engine.pause = True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.http.post, "/generate", json=body)
        deadline = time.monotonic() + 5
        while server.client.num_pending == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        [entry] = server.http.get("/v1/loads").json()["loads"]
        assert entry["num_running_reqs"] + entry["num_waiting_reqs"] == 1
        assert entry["num_total_reqs"] == 1
        server.engine.pause = False
        assert waiting.result(5).status_code == 200


def test_a_dead_engine_has_no_load_to_report(fresh_server: ScriptedServer) -> None:
    server = fresh_server
    assert server.http.get("/v1/loads").status_code == 503
    server.make_ready()
    server.engine.pause = True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.http.post, "/generate", json={"input_ids": [5]})
        deadline = time.monotonic() + 5
        while server.client.num_pending == 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert server.http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 1
        server.engine.die()
        assert waiting.result(5).status_code == 503
    reply = server.http.get("/v1/loads")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert reply.json()["object"] == "error"


def test_metrics_are_prometheus_text(server: ScriptedServer) -> None:
    server.http.get("/health_generate")
    reply = server.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'sglang:max_total_num_tokens{model_name="tetrarch-demo"} 4096.0' in reply.text
    assert 'sglang:prompt_tokens_total{model_name="tetrarch-demo"} 7.0' in reply.text
