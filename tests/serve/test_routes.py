# SPDX-License-Identifier: Apache-2.0
"""Every row of the route table answers, under each of its names, for whom it says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tetrarch.serve.routes import ROUTES, Access, Route

PAIRS = [
    (method, path, route) for route in ROUTES for path in route.paths for method in route.methods
]


def _url(path: str) -> str:
    return path.replace("{name:path}", "tetrarch-demo")


def _needs_more(route: Route) -> bool:
    """Whether an empty body is too little: it lacks a field, or any prompt."""
    if route.body is None:
        return False
    if {"/generate", "/v1/chat/completions"}.intersection(route.paths):
        return True
    return any(field.required for field in msgspec.structs.fields(route.body))


@pytest.fixture(autouse=True)
def _values(server: Any, keyed_server: Any) -> None:
    for each in (server, keyed_server):
        each.engine.reply = {"ok": True, "payload": {"checksum": "c", "values": []}}


@pytest.mark.parametrize(("method", "path", "route"), PAIRS, ids=[f"{m} {p}" for m, p, _ in PAIRS])
def test_every_route_exists_and_a_trailing_slash_does_not_matter(
    server: Any, method: str, path: str, route: Route
) -> None:
    for url in (_url(path), f"{_url(path)}/"):
        reply = server.http.request(method, url, json={} if route.body else None)
        assert reply.status_code == (400 if _needs_more(route) else 200), reply.text


def test_paths_and_methods_are_unique() -> None:
    keys = [(method, path) for method, path, _ in PAIRS]
    assert len(keys) == len(set(keys))


def test_unknown_paths_and_methods_are_json_errors(server: Any) -> None:
    missing = server.http.get("/no/such/path")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    wrong = server.http.get("/generate")
    assert wrong.status_code == 405
    assert "error" in wrong.json()


@pytest.mark.parametrize(("method", "path", "route"), PAIRS, ids=[f"{m} {p}" for m, p, _ in PAIRS])
def test_access_is_what_the_row_says(
    keyed_server: Any, method: str, path: str, route: Route
) -> None:
    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {} if route.body else None
        return keyed_server.http.request(method, _url(path), json=body, headers=headers).status_code

    answered = (200, 400)
    assert (status(None) in answered) == (route.access is Access.OPEN)
    assert (status("open") in answered) == (route.access is not Access.CONTROL)
    assert (status("sesame") in answered) == (route.access is not Access.KEY)
    assert (status("wrong") in answered) == (route.access is Access.OPEN)
