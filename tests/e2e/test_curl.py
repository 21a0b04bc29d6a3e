# SPDX-License-Identifier: Apache-2.0
"""A plain `curl` of every endpoint, read off the route table."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tetrarch.config.checkpoint import demo_model_path
from tetrarch.serve.routes import ROUTES

if TYPE_CHECKING:
    from conftest import RunningServer

KEY = "open-sesame"
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
BODIES = {
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/abort_request": {"rid": "nobody"},
}
# What trainers call changes the weights or the memory. Some calls need a partner: 400 says which.
TRAINERS: dict[str, tuple[dict[str, Any], str]] = {
    "/pause_generation": ({"mode": "retract"}, "200"),
    "/continue_generation": ({}, "200"),
    "/update_weights_from_disk": ({"model_path": demo_model_path()}, "200"),
    "/update_weights_from_tensor": ({"serialized_named_tensors": [NO_TENSORS]}, "200"),
    "/update_weights_from_distributed": ({"names": [], "dtypes": [], "shapes": []}, "400"),
    "/init_weights_update_group": (
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 1},
        "400",
    ),
    "/destroy_weights_update_group": ({}, "400"),
    "/begin_weight_update": ({}, "200"),
    "/end_weight_update": ({}, "400"),
    "/post_process_weights": ({}, "200"),
    "/update_weight_version": ({"new_version": "default"}, "200"),
    "/get_weights_by_name": ({"name": "model.norm.weight"}, "200"),
    "/weights_checker": ({"action": "checksum"}, "200"),
    "/release_memory_occupation": ({"tags": ["kv_cache"]}, "200"),
    "/resume_memory_occupation": ({}, "200"),
}
CALLS = [(method, path) for route in ROUTES for path in route.paths for method in route.methods]


def curl(url: str, method: str, body: dict[str, Any] | None) -> tuple[str, str]:
    """Call, and return the answer and its status."""
    command = ["curl", "-sS", "-X", method, url, "-H", f"Authorization: Bearer {KEY}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    ran = subprocess.run(
        [*command, "-w", "\n%{http_code}"], capture_output=True, text=True, timeout=60, check=True
    )
    answer, _, status = ran.stdout.rpartition("\n")
    return answer, status


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    ("method", "path"), CALLS, ids=[f"{method} {path}" for method, path in CALLS]
)
def test_curl_is_answered(
    server: RunningServer, method: str, path: str, request: pytest.FixtureRequest
) -> None:
    if path in TRAINERS:
        trained = request.getfixturevalue("trained")  # is repaired afterwards
        body, expected = TRAINERS[path]
        answer, status = curl(trained.url + path, method, body)
        assert status == expected, answer
        assert json.loads(answer)
        return
    url = server.url + path.replace("{name:path}", "tetrarch-demo")
    answer, status = curl(url, method, BODIES.get(path))
    assert status == "200", answer
    if path.startswith("/v1"):
        assert json.loads(answer)["object" if path != "/v1/loads" else "loads"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_curl_reads_a_stream_line_by_line(server: RunningServer, path: str) -> None:
    """Every line that is not empty is an event: no comments, no event names."""
    body = json.dumps({**BODIES[path], "stream": True})
    command = ["curl", "-sSN", server.url + path, "-H", f"Authorization: Bearer {KEY}"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    events = ran.stdout.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: ")) for event in events)
    assert events
