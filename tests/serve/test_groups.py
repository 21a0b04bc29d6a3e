# SPDX-License-Identifier: Apache-2.0
"""Process groups and broadcast weights: what reaches the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tetrarch.engine.actions import DestroyGroup, InitGroup, UpdateFromDistributed

Ask = Callable[..., Any]
JOIN = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
TWO = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []]}


def test_a_group_is_joined_with_what_the_device_speaks(asked: Ask) -> None:
    reply, [action] = asked("/init_weights_update_group", JOIN, message="joined")
    assert reply.json() == {"success": True, "message": "joined"}
    assert isinstance(action, InitGroup)
    assert (action.master_address, action.master_port) == ("10.0.0.1", 29500)
    assert (action.rank_offset, action.world_size) == (1, 2)
    assert (action.group_name, action.backend) == ("weight_update_group", "gloo")
    _, [action] = asked(
        "/init_weights_update_group", {**JOIN, "group_name": "mine", "backend": "nccl"}
    )
    assert (action.group_name, action.backend) == ("mine", "nccl")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("master_address", None),
        ("master_port", 0),
        ("master_port", 65536),
        ("master_port", "29500"),
        ("rank_offset", 0),
        ("rank_offset", 2),
        ("world_size", 1),
        ("world_size", 2**63),
        ("group_name", ""),
        ("backend", "mpi"),
    ],
)
def test_a_senseless_group_is_refused(asked: Ask, name: str, value: Any) -> None:
    reply, actions = asked("/init_weights_update_group", {**JOIN, name: value})
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == name


def test_a_group_is_left_by_name(asked: Ask) -> None:
    for body, name in ((None, "weight_update_group"), ({"group_name": "mine"}, "mine")):
        _, [action] = asked("/destroy_weights_update_group", body)
        assert isinstance(action, DestroyGroup)
        assert action.group_name == name


def test_broadcast_tensors_are_described(asked: Ask) -> None:
    reply, [action] = asked("/update_weights_from_distributed", TWO, payload={"is_open": False})
    assert reply.json() == {"success": True, "message": "", "is_open": False}
    assert isinstance(action, UpdateFromDistributed)
    assert action.names == ("a", "b")
    assert action.dtypes == ("bfloat16", "float32")
    assert action.shapes == ((2, 3), ())
    assert (action.group_name, action.load_format) == ("weight_update_group", None)
    assert (action.flush_cache, action.abort_all_requests) == (True, False)
    more = {
        "group_name": "mine",
        "flush_cache": False,
        "abort_all_requests": True,
        "weight_version": "9",
        "load_format": "flattened_bucket",
        "selector": "all",
        "torch_empty_cache": False,
    }
    _, [action] = asked("/update_weights_from_distributed", {**TWO, **more})
    assert (action.group_name, action.load_format) == ("mine", "flattened_bucket")
    assert (action.flush_cache, action.abort_all_requests) == (False, True)
    assert action.weight_version == "9"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"names": None}, "names"),
        ({"names": ["a"]}, "dtypes"),
        ({"shapes": [[1]]}, "shapes"),
        ({"shapes": [[1], [-1]]}, "shapes"),
        ({"shapes": [1, 2]}, "shapes"),
        ({"shapes": [[1], [2**64]]}, None),
        ({"load_format": "direct"}, "load_format"),
        ({"selector": "draft"}, "selector"),
    ],
)
def test_a_senseless_broadcast_is_refused(
    asked: Ask, change: dict[str, Any], param: str | None
) -> None:
    reply, actions = asked("/update_weights_from_distributed", {**TWO, **change})
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == param
