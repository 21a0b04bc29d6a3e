# SPDX-License-Identifier: Apache-2.0
"""Keys, over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import ScriptedServer


def status(server: ScriptedServer, path: str, key: str | None, method: str = "GET") -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.http.request(method, path, headers=headers).status_code


@pytest.mark.parametrize("path", ["/health", "/health/", "/ready", "/ping", "/health_generate"])
def test_probes_need_no_key(keyed_server: ScriptedServer, path: str) -> None:
    assert status(keyed_server, path, None) == 200


def test_metrics_and_options_need_no_key(keyed_server: ScriptedServer) -> None:
    assert status(keyed_server, "/metrics", None) == 200
    assert status(keyed_server, "/v1/models", None, "OPTIONS") == 405


def test_everything_else_needs_the_key(keyed_server: ScriptedServer) -> None:
    for path in ("/v1/models", "/v1/models/", "/server_info", "/nowhere"):
        assert status(keyed_server, path, None) == 401
        assert status(keyed_server, path, "wrong") == 401
        assert status(keyed_server, path, "ope") == 401
    assert status(keyed_server, "/v1/models", "open") == 200


def test_control_endpoints_take_the_admin_key_only(keyed_server: ScriptedServer) -> None:
    assert status(keyed_server, "/flush_cache", None) == 401
    assert status(keyed_server, "/flush_cache", "open") == 403
    assert status(keyed_server, "/flush_cache/", "open") == 403
    assert status(keyed_server, "/flush_cache", "sesame") == 200


def test_another_scheme_is_no_key(keyed_server: ScriptedServer) -> None:
    response = keyed_server.http.get("/v1/models", headers={"Authorization": "Basic open"})
    assert response.status_code == 401
    assert response.json()["type"] == "AuthenticationError"
    assert response.headers["www-authenticate"] == "Bearer"


def test_without_keys_everything_is_open(server: ScriptedServer) -> None:
    assert status(server, "/v1/models", None) == 200
    assert status(server, "/flush_cache", None) == 200


def test_keys_are_shown_nowhere(keyed_server: ScriptedServer) -> None:
    response = keyed_server.http.get("/server_info", headers={"Authorization": "Bearer open"})
    info = response.json()
    assert info["api_key"] == info["admin_api_key"] == "***"
    assert info["internal_states"][0]["api_key"] == "***"
    assert "sesame" not in response.text
    assert '"open"' not in response.text
