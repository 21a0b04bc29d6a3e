# SPDX-License-Identifier: Apache-2.0
"""Memory that is lent and taken again: what reaches the engine, and what the client reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.actions import Release, Resume

Ask = Callable[..., Any]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.mark.parametrize(("path", "kind"), [(RELEASE, Release), (RESUME, Resume)])
def test_tags_may_be_all_some_or_text(asked: Ask, path: str, kind: type) -> None:
    payload = {"released": ["weights"], "state": {"weights": "released"}}
    for method, query, body, tags in (
        ("POST", "", None, ()),
        ("GET", "", None, ()),
        ("POST", "", {"tags": None}, ()),
        ("POST", "", {"tags": ["kv_cache", "weights", "kv_cache"]}, ("kv_cache", "weights")),
        ("GET", "?tags=weights,cuda_graph", None, ("weights", "cuda_graph")),
    ):
        reply, [action] = asked(path + query, body, method=method, payload=payload)
        assert reply.status_code == 200
        assert reply.json() == {"success": True, "message": "", **payload}
        assert isinstance(action, kind)
        assert action.tags == tags


def test_releasing_may_wait_and_keep_the_weights(asked: Ask) -> None:
    _, [action] = asked(RELEASE)
    assert (action.wait_s, action.backup) == (0, None)
    _, [action] = asked(RELEASE, {"wait_s": 2.5, "cpu_backup": True})
    assert (action.wait_s, action.backup) == (2.5, True)
    _, [action] = asked(f"{RELEASE}?wait_s=3", {"tags": ["weights"]})
    assert (action.wait_s, action.tags) == (3, ("weights",))


@pytest.mark.parametrize("path", [RELEASE, RESUME])
@pytest.mark.parametrize("tags", [["gpu"], "all", [""], [5], {"weights": True}, ["weights", "x"]])
def test_an_unknown_tag_is_refused(asked: Ask, path: str, tags: Any) -> None:
    reply, actions = asked(path, {"tags": tags})
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == "tags"


@pytest.mark.parametrize("path", [RELEASE, RESUME])
def test_an_empty_list_is_a_mistake_and_not_everything(asked: Ask, path: str) -> None:
    reply, actions = asked(path, {"tags": []})
    assert (reply.status_code, actions) == (400, [])
    error = reply.json()["error"]
    assert error["param"] == "tags"
    assert "weights, kv_cache, cuda_graph" in error["message"]


@pytest.mark.parametrize("wait", [-1, 3601, "soon", True])
def test_a_senseless_wait_is_refused(asked: Ask, wait: Any) -> None:
    reply, actions = asked(RELEASE, {"wait_s": wait})
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == "wait_s"


def test_busy_is_a_refusal(asked: Ask) -> None:
    refusal = {"ok": False, "status": 400, "code": "busy", "message": "2 requests are running"}
    reply, _ = asked(RELEASE, **refusal)
    assert reply.status_code == 400
    assert (reply.json()["success"], reply.json()["error"]["type"]) == (False, "busy")
