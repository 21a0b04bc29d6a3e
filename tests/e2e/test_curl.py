# SPDX-License-Identifier: Apache-2.0
"""A plain `curl` of every endpoint, read off the route table."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tetrarch.serve.routes import ROUTES

if TYPE_CHECKING:
    from conftest import RunningServer

KEY = "open-sesame"
BODIES = {
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/abort_request": {"rid": "nobody"},
}
CALLS = [(method, path) for route in ROUTES for path in route.paths for method in route.methods]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("method", "path"), CALLS, ids=[f"{m} {p}" for m, p in CALLS])
def test_curl_gets_200(server: RunningServer, method: str, path: str) -> None:
    url = server.url + path.replace("{name:path}", "tetrarch-demo")
    command = ["curl", "-sS", "-X", method, url, "-H", f"Authorization: Bearer {KEY}"]
    if path in BODIES:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(BODIES[path])]
    ran = subprocess.run(
        [*command, "-w", "\n%{http_code}"], capture_output=True, text=True, timeout=60, check=True
    )
    body, _, status = ran.stdout.rpartition("\n")
    assert status == "200", body
    if path.startswith("/v1"):
        assert json.loads(body)["object" if path != "/v1/loads" else "loads"]


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
