# SPDX-License-Identifier: Apache-2.0
"""What a server says about itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tetrarch.engine.acceptance import Acceptance, SpecStatus

if TYPE_CHECKING:
    import pytest

    from conftest import ScriptedServer


def test_the_model_card_is_constant(server: ScriptedServer) -> None:
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["id"] == "tetrarch-demo"
    assert card["created"] == server.door.created
    assert card["max_model_len"] == 256
    assert server.http.get("/v1/models/tetrarch-demo").json() == card


def test_another_model_is_not_found_in_the_openai_shape(server: ScriptedServer) -> None:
    reply = server.http.get("/v1/models/org/other")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "org/other" in error["message"]


def test_model_info_names_the_checkpoint(server: ScriptedServer) -> None:
    info = server.http.get("/model_info").json()
    assert info["model_path"] == server.door.plan.model.path
    assert info["weight_version"] == "v7"
    assert info["model_type"] == "qwen3_moe"
    assert info["architectures"] == ["Qwen3MoeForCausalLM"]
    assert info["is_generation"] is True
    assert server.http.get("/get_model_info").json() == info
    assert server.http.get("/get_weight_version").json() == {"weight_version": "v7"}


def test_server_info_holds_plan_sizes_and_state(server: ScriptedServer) -> None:
    server.http.get("/health_generate")  # a heartbeat has come
    info = server.http.get("/server_info").json()
    assert info["status"] == "ready"
    assert info["max_total_num_tokens"] == 4096
    assert info["max_req_input_len"] == 255
    assert (info["tp_size"], info["dp_size"], info["ep_size"], info["pp_size"]) == (1, 1, 1, 1)
    assert (info["nnodes"], info["node_rank"], info["enable_memory_saver"]) == (1, 0, False)
    assert info["plan"]["model"]["facts"]["num_experts"] == 8
    assert any(decision["field"] == "quantization" for decision in info["resolution_log"])
    assert "decisions" not in info["plan"]
    [state] = info["internal_states"]
    assert state["memory_usage"] == {
        "weight": 1.0,
        "kvcache": 2.0,
        "startup_available": 8.0,
        "token_capacity": 4096,
        "graph": {},
    }
    assert state["counters"]["prompt_tokens_total"] == 7
    assert (state["decode_cuda_graph_bs"], state["decode_cuda_graph_memory_gb"]) == ([], 0.0)
    assert state["disaggregation_mode"] == info["disaggregation_mode"] == "null"
    assert 0 < info["startup_time"] == server.door.metrics.startup_s
    assert server.http.get("/get_server_info").json()["version"] == info["version"]


def test_server_info_says_how_drafts_have_gone(server: ScriptedServer) -> None:
    [state] = server.http.get("/server_info").json()["internal_states"]
    assert "avg_spec_accept_length" not in state
    lifetime = Acceptance(
        num_verifies=10, num_tokens=25, num_proposed=30, num_accepted=15, histogram=[3, 3, 2, 2]
    )
    recent = Acceptance(num_verifies=2, num_tokens=6, num_proposed=6, num_accepted=4)
    for since_flush, mean in ((recent, 3.0), (Acceptance(), 2.5)):
        server.told(spec=SpecStatus(num_steps=3, lifetime=lifetime, since_flush=since_flush))
        [state] = server.http.get("/server_info").json()["internal_states"]
        assert state["avg_spec_accept_length"] == mean
        assert state["speculation"]["lifetime"] == {
            "num_verifies": 10,
            "num_tokens": 25,
            "num_proposed": 30,
            "num_accepted": 15,
            "histogram": [3, 3, 2, 2],
            "length": 2.5,
            "rate": 0.5,
        }
        assert state["speculation"]["since_flush"]["num_accepted"] == since_flush.num_accepted
    server.told(spec=None)


def test_the_command_line_is_shown_without_its_keys(
    keyed_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["tetrarch", "serve", "--api-key", "open", "--admin-api-key=sesame", "--port", "1"]
    monkeypatch.setattr(sys, "argv", command)
    reply = keyed_server.http.get("/server_info", headers={"Authorization": "Bearer open"})
    shown = reply.json()["launch_command"]
    assert shown == "tetrarch serve --api-key *** --admin-api-key=*** --port 1"
    assert reply.json()["plan"]["serve"]["admin_api_key"] == "***"
    assert "sesame" not in reply.text


def test_a_new_checkpoint_changes_path_and_version_but_not_the_name(
    fresh_server: ScriptedServer,
) -> None:
    server = fresh_server
    before = server.http.get("/model_info").json()
    assert server.http.get("/server_info").json()["startup_time"] is None
    assert before["model_path"] == server.door.plan.model.path  # before the engine is ready
    server.make_ready()
    [card] = server.http.get("/v1/models").json()["data"]
    server.told(weight_version="12", model_path="/models/next", state="ready", is_paused=True)
    info = server.http.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == ("/models/next", "12")
    assert info["served_model_name"] == before["served_model_name"] == card["id"]
    assert info["tokenizer_path"] == before["tokenizer_path"]
    assert server.http.get("/get_weight_version").json() == {"weight_version": "12"}
    assert server.http.get("/v1/models").json()["data"] == [{**card, "root": "/models/next"}]
    told = server.http.get("/server_info").json()
    assert (told["model_path"], told["weight_version"]) == ("/models/next", "12")
    assert (told["weights"], told["is_paused"]) == ("ready", True)
