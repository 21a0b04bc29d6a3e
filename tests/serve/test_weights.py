# SPDX-License-Identifier: Apache-2.0
"""Updates from disk and by tensors: what reaches the engine, and what the client reads."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tetrarch.engine.actions import (
    BeginUpdate,
    EndUpdate,
    PostProcess,
    UpdateFromDisk,
    UpdateFromTensors,
)
from tetrarch.engine.messages import ControlReply

if TYPE_CHECKING:
    from conftest import ScriptedServer

Ask = Callable[..., Any]
DATA = base64.b64encode(b"tensors").decode()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def bare(message: Any) -> Any:
    """A message without its ticket, to compare."""
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "ticket"}


def test_an_update_from_disk_has_defaults(asked: Ask, folder: str) -> None:
    payload = {
        "num_paused_requests": 3,
        "atomic": True,
        "weight_version": "1",
        "seconds": 0.5,
        "source": "disk",
    }
    reply, [action] = asked(
        "/update_weights_from_disk",
        {"model_path": folder},
        message="updated",
        payload=payload,
    )
    assert reply.status_code == 200
    assert reply.json() == {"success": True, "message": "updated", **payload}
    assert bare(action) == bare(UpdateFromDisk(ticket=0, path=folder))


def test_every_field_of_an_update_from_disk_is_accepted(asked: Ask, folder: str) -> None:
    fields = {
        "load_format": "auto",
        "abort_all_requests": True,
        "weight_version": "step 9",
        "is_async": True,
        "torch_empty_cache": True,
        "keep_pause": True,
        "recapture_cuda_graph": True,
        "token_step": 7,
        "flush_cache": False,
        "manifest": None,
        "atomic": False,
        "dry_run": True,
        "from": "another version",
    }
    reply, [action] = asked("/update_weights_from_disk", {"model_path": folder, **fields})
    assert reply.status_code == 200
    assert bare(action) == {
        "path": folder,
        "weight_version": "step 9",
        "flush_cache": False,
        "abort_all_requests": True,
        "keep_pause": True,
        "atomic": False,
        "dry_run": True,
    }
    nulls = dict.fromkeys(fields)
    reply, [action] = asked("/update_weights_from_disk", {"model_path": folder, **nulls})
    assert bare(action) == bare(UpdateFromDisk(ticket=0, path=folder))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model_path"),
        ({"model_path": 5}, "model_path"),
        ({"model_path": "no/such/folder"}, "model_path"),
        ({"load_format": "dummy"}, "load_format"),
        ({"flush_cache": "yes"}, "flush_cache"),
        ({"weight_version": "v" * 257}, "weight_version"),
        ({"weight_version": 5}, "weight_version"),
        ({"manifest": {"a": 1}}, "manifest"),
        ({"atomic": 1}, "atomic"),
    ],
)
def test_a_refusal_names_the_field_and_the_engine_hears_nothing(
    asked: Ask, folder: str, body: dict[str, Any], param: str
) -> None:
    sent = body if param == "model_path" else {"model_path": folder, **body}
    reply, actions = asked("/update_weights_from_disk", sent)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert param in reply.json()["error"]["message"]
    assert actions == []


def test_only_folders_below_the_weights_root_are_read(asked: Ask, server: ScriptedServer) -> None:
    assert server.door.plan.serve.weights_root == "/"  # loopback
    object.__setattr__(server.door.plan.serve, "weights_root", "/no/such/root")
    try:
        reply, actions = asked("/update_weights_from_disk", {"model_path": "/etc"})
    finally:
        object.__setattr__(server.door.plan.serve, "weights_root", "/")
    assert (reply.status_code, actions) == (403, [])
    assert reply.json()["error"]["type"] == "PermissionDeniedError"


def test_what_the_engine_refuses_has_a_message_for_both_kinds_of_reader(
    asked: Ask, folder: str
) -> None:
    reply, _ = asked(
        "/update_weights_from_disk",
        {"model_path": folder},
        ok=False,
        message="2 tensors are missing: a, b",
        status=400,
        code="checkpoint",
        payload={"num_paused_requests": 0},
    )
    assert reply.status_code == 400
    assert reply.json() == {
        "success": False,
        "message": "2 tensors are missing: a, b",
        "num_paused_requests": 0,
        "error": {
            "message": "2 tensors are missing: a, b",
            "type": "checkpoint",
            "param": None,
            "code": 400,
        },
    }
    assert "retry-after" not in reply.headers


def test_not_now_says_when_to_come_again(asked: Ask, folder: str) -> None:
    reply, _ = asked(
        "/update_weights_from_disk",
        {"model_path": folder},
        ok=False,
        message="the weights are released",
        status=503,
        code="weights_released",
    )
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "5"
    assert reply.json()["error"]["type"] == "weights_released"


def test_a_tensor_update_reaches_the_engine_as_bytes(asked: Ask) -> None:
    body = {"serialized_named_tensors": [DATA]}
    reply, [action] = asked("/update_weights_from_tensor", body, message="taken")
    assert reply.json() == {"success": True, "message": "taken"}
    assert bare(action) == bare(UpdateFromTensors(ticket=0, data=b"tensors"))
    more = {
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": True,
        "weight_version": "9",
        "selector": "target",
        "torch_empty_cache": True,
        "disable_draft_model": None,
    }
    _, [action] = asked("/update_weights_from_tensor", {**body, **more})
    assert bare(action) == {
        "data": b"tensors",
        "load_format": "flattened_bucket",
        "weight_version": "9",
        "flush_cache": False,
        "abort_all_requests": True,
        "selector": "target",
    }
    _, [action] = asked("/update_weights_from_tensor", {**body, "disable_draft_model": True})
    assert action.selector == "target"


def test_a_large_payload_arrives(asked: Ask) -> None:
    data = bytes(range(256)) * (1 << 16)  # 16 MiB, and 21 MiB of JSON
    body = {"serialized_named_tensors": [base64.b64encode(data).decode()]}
    reply, [action] = asked("/update_weights_from_tensor", body)
    assert reply.status_code == 200
    assert action.data == data


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "serialized_named_tensors"),
        ({"serialized_named_tensors": []}, "serialized_named_tensors"),
        ({"serialized_named_tensors": DATA}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [DATA, DATA]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": ["no base64"]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [5]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [DATA], "selector": "draft"}, "selector"),
        ({"serialized_named_tensors": [DATA], "selector": "some"}, "selector"),
    ],
)
def test_a_refused_tensor_update_names_the_field(
    asked: Ask, body: dict[str, Any], param: str
) -> None:
    reply, actions = asked("/update_weights_from_tensor", body)
    assert (reply.status_code, actions) == (400, [])
    assert reply.json()["error"]["param"] == param


def test_sessions_begin_and_end(asked: Ask) -> None:
    for body in (None, {}, {"selector": "all"}, {"selector": None, "atomic": None}):
        _, [action] = asked("/begin_weight_update", body)
        assert bare(action) == bare(BeginUpdate(ticket=0))
    _, [action] = asked("/begin_weight_update", {"atomic": True})
    assert action.atomic is True
    reply, actions = asked("/begin_weight_update", {"selector": "draft"})
    assert (reply.status_code, actions) == (400, [])
    for body in (None, {}, {"anything": 1}):
        _, [action] = asked("/end_weight_update", body)
        assert isinstance(action, EndUpdate)


def test_older_trainers_begin_and_end_with_flags(asked: Ask) -> None:
    names = ("restore_weights_before_load", "post_process_quantization")
    for values in ((True, False), (False, True), (True, True), (None, None)):
        _, [action] = asked("/post_process_weights", dict(zip(names, values, strict=True)))
        assert isinstance(action, PostProcess)
        assert (action.begins, action.ends) == tuple(map(bool, values))


def test_updates_are_counted_by_source_and_result(asked: Ask, server: ScriptedServer) -> None:
    def count(result: str) -> float:
        label = f'tetrarch:weight_update_total{{model_name="tetrarch-demo",result="{result}"'
        lines = server.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(label) and "disk" in line]
        return float(found[0].split()[-1]) if found else 0

    before = count("success"), count("failure")
    folder = str(Path(server.door.plan.model.path))
    done = {"seconds": 0.2, "source": "disk"}
    asked("/update_weights_from_disk", {"model_path": folder}, payload=done)
    asked("/update_weights_from_disk", {"model_path": folder}, ok=False, status=400)
    asked("/update_weights_from_disk", {"model_path": folder, "dry_run": True})
    assert (count("success"), count("failure")) == (before[0] + 1, before[1] + 1)
    assert "sglang:weight_load_duration_seconds_bucket" in server.http.get("/metrics").text


GROUP = {"names": [], "dtypes": [], "shapes": []}
DONE = {"seconds": 2.0, "source": "distributed"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": [DATA]}),
        ("/end_weight_update", {}),
        ("/post_process_weights", {"post_process_quantization": True}),
        ("/continue_generation", {}),
        ("/flush_cache", {}),
    ],
)
def test_whatever_ends_an_update_times_it(
    asked: Ask, server: ScriptedServer, path: str, body: dict[str, Any]
) -> None:
    def told() -> tuple[float, ...]:
        text = server.http.get("/metrics").text
        return tuple(
            float(re.findall(rf"^{name}.*distributed.* (.*)$", text, re.MULTILINE)[0])
            for name in (
                'tetrarch:weight_update_total.*result="success"',
                "sglang:weight_load_duration_seconds_sum",
            )
        )

    asked("/update_weights_from_distributed", GROUP, payload=DONE)  # now the series is there
    count, seconds = told()
    asked(path, body, payload=DONE)
    assert told() == (count + 1, seconds + 2)
    asked(path, body)
    assert told() == (count + 1, seconds + 2)


def test_an_update_that_no_call_has_ended_is_timed(asked: Ask, server: ScriptedServer) -> None:
    """The engine tells under ticket 0 what a request, or five minutes without a call, ended."""

    def told() -> float:
        text = server.http.get("/metrics").text
        name = "sglang:weight_load_duration_seconds_sum.*distributed"
        return float(re.findall(rf"^{name}.* (.*)$", text, re.MULTILINE)[0])

    asked("/update_weights_from_distributed", GROUP, payload=DONE)
    seconds = told()
    server.call(lambda: server.engine.tell(ControlReply(ticket=0, ok=True, payload=DONE)))
    deadline = time.monotonic() + 5
    while told() == seconds:
        assert time.monotonic() < deadline
    assert told() == seconds + 2


def test_an_update_that_cannot_be_ended_counts_as_a_failure(
    asked: Ask, server: ScriptedServer
) -> None:
    def count() -> float:
        line = 'tetrarch:weight_update_total{model_name="tetrarch-demo",result="failure",source="te'
        text = server.http.get("/metrics").text
        return float(next(one for one in text.splitlines() if one.startswith(line)).split()[-1])

    before = count()
    asked("/end_weight_update", {}, ok=False, status=400)
    assert count() == before + 1
