# SPDX-License-Identifier: Apache-2.0
"""Weights by name and by checksum, and their version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.actions import CheckWeights, GetWeights, SetVersion

Ask = Callable[..., Any]


def test_a_weight_is_a_bare_nested_list(asked: Ask) -> None:
    values = {"values": [[1.5, -2.0], [0.0, 3.25]]}
    reply, [action] = asked("/get_weights_by_name", {"name": "norm.weight"}, payload=values)
    assert reply.json() == values["values"]
    assert isinstance(action, GetWeights)
    assert (action.name, action.truncate_size) == ("norm.weight", 100)
    for method, path, body in (
        ("GET", "/get_weights_by_name?name=w&truncate_size=2", None),
        ("GET", "/get_weights_by_name", {"name": "w", "truncate_size": 2}),
        ("POST", "/get_weights_by_name?truncate_size=9", {"name": "w", "truncate_size": 2}),
    ):
        reply, [action] = asked(path, body, method=method, payload=values)
        assert reply.status_code == 200
        assert (action.name, action.truncate_size) == ("w", 2)


def test_an_unknown_weight_is_a_refusal(asked: Ask) -> None:
    refusal = {"ok": False, "message": "there is no weight 'x'", "status": 400}
    reply, _ = asked("/get_weights_by_name", {"name": "x"}, **refusal)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "there is no weight 'x'"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/get_weights_by_name", "name"),
        ("/get_weights_by_name?name=w&truncate_size=many", "truncate_size"),
        ("/get_weights_by_name?name=w&truncate_size=-1", "truncate_size"),
        ("/weights_checker?action=peek", "action"),
    ],
)
def test_a_refusal_names_the_parameter(asked: Ask, path: str, param: str) -> None:
    reply, actions = asked(path, method="GET")
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == param


def test_checksums_are_told_by_rank_and_as_one(asked: Ask) -> None:
    found = {"checksum": "c", "checksums": {"a": "1", "b": "2"}}
    for body in (None, {}, {"action": "checksum", "selector": "all"}):
        reply, [action] = asked("/weights_checker", body, payload=found)
        assert isinstance(action, CheckWeights)
        assert action.action == "checksum"
        told = reply.json()
        assert told["success"] is True
        assert told["per_engine_checksum"] == told["checksum"] == "c"
        assert told["ranks"] == [{"rank": 0, **found}]


@pytest.mark.parametrize("name", ["snapshot", "compare", "reset_tensors"])
def test_the_other_checks_reach_the_engine(asked: Ask, name: str) -> None:
    body = {"action": name, "skip_tensor_list": ["a", "b"], "allow_quant_error": True}
    reply, [action] = asked("/weights_checker", body)
    assert reply.json() == {"success": True, "message": ""}
    assert (action.action, action.skip) == (name, ("a", "b"))
    reply, _ = asked("/weights_checker", body, ok=False, status=400, message="a differs")
    assert (reply.status_code, reply.json()["success"]) == (400, False)


def test_a_version_is_named_and_by_default_ends_all_requests(asked: Ask) -> None:
    reply, [action] = asked(
        "/update_weight_version", {"new_version": "9"}, payload={"new_version": "9"}
    )
    assert reply.json() == {"success": True, "message": "", "new_version": "9"}
    assert isinstance(action, SetVersion)
    assert (action.version, action.abort_all_requests) == ("9", True)
    for value, wanted in ((False, False), (True, True), (None, True)):
        body = {"new_version": "9", "abort_all_requests": value}
        _, [action] = asked("/update_weight_version", body)
        assert action.abort_all_requests is wanted
    reply, actions = asked("/update_weight_version", {})
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == "new_version"
