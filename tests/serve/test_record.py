# SPDX-License-Identifier: Apache-2.0
"""The log has a line for every refused control call, and for what changes the server for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ask = Callable[..., Any]
Log = pytest.LogCaptureFixture
JOIN = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
TWO = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []]}


def lines(log: Log) -> list[tuple[str, str]]:
    mine = [one for one in log.records if one.name == "tetrarch.serve.record"]
    return [(one.levelname, one.getMessage()) for one in mine]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/"}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [""]}),
        ("/update_weights_from_distributed", TWO),
        ("/init_weights_update_group", JOIN),
        ("/end_weight_update", None),
    ],
)
def test_what_the_engine_refuses_is_one_line_of_the_log(
    asked: Ask, caplog: Log, path: str, body: Any
) -> None:
    refusal = {"ok": False, "status": 400, "code": "invalid_weights"}
    reply, _ = asked(path, body, **refusal, message="the trainer died\nI am forged")
    assert reply.status_code == 400
    [(level, words)] = lines(caplog)
    assert (level, words.partition(":")[0]) == ("WARNING", path)
    assert "\n" not in words
    if "disk" not in path:  # that one may be refused before the engine hears of it
        assert words == f"{path}: 400 the trainer died I am forged"


def test_what_the_door_refuses_is_told_alike(asked: Ask, caplog: Log) -> None:
    reply, actions = asked("/update_weights_from_distributed", {**TWO, "shapes": []})
    assert (reply.status_code, actions) == (400, [])
    message = reply.json()["error"]["message"]
    told = f"/update_weights_from_distributed: 400 {message}"
    assert lines(caplog) == [("WARNING", told)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weights_update_group", JOIN),
        ("/destroy_weights_update_group", None),
        ("/pause_generation", None),
        ("/continue_generation", None),
        ("/release_memory_occupation", None),
        ("/resume_memory_occupation", None),
    ],
)
def test_what_changes_the_server_for_all_is_told(
    asked: Ask, caplog: Log, path: str, body: Any
) -> None:
    caplog.set_level("INFO")
    assert asked(path, body, message="it is done")[0].status_code == 200
    assert lines(caplog) == [("INFO", f"{path}: 200 it is done")]


def test_other_successes_are_not_told_here(asked: Ask, caplog: Log) -> None:
    caplog.set_level("INFO")
    for path, body in (("/update_weights_from_distributed", TWO), ("/begin_weight_update", {})):
        asked(path, body)
    assert asked("/flush_cache")[0].status_code == 200
    assert lines(caplog) == []
