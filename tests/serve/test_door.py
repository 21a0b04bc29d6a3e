# SPDX-License-Identifier: Apache-2.0
"""Who is let in, and cut to what size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tetrarch.core.errors import EngineDead, RequestError
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.serve.door import Door, new_rid

if TYPE_CHECKING:
    from conftest import ScriptedServer


def request(*prompt_ids: int, new: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=new)
    return GenerateRequest(rid="a", prompt_ids=prompt_ids, sampling=sampling)


def lenient(door: Door) -> Door:
    """The door of a server with `--allow-auto-truncate`."""
    serve = replace(door.plan.serve, allow_auto_truncate=True)
    return replace(door, plan=replace(door.plan, serve=serve))


def test_a_request_that_fits_passes(server: ScriptedServer) -> None:
    asked = request(*[5] * 255)
    assert server.door.admit(asked, {}).prompt_ids == asked.prompt_ids


def test_an_overlong_prompt_is_refused_under_the_clients_name(server: ScriptedServer) -> None:
    with pytest.raises(RequestError, match="256 tokens, and at most 255") as refused:
        server.door.admit(request(*[5] * 256), {"input_ids": "text"})
    assert refused.value.param == "text"


def test_a_prompt_that_is_only_scored_may_fill_the_context(server: ScriptedServer) -> None:
    assert len(server.door.admit(request(*[5] * 256, new=0), {}).prompt_ids) == 256


def test_a_lenient_server_cuts_the_end(server: ScriptedServer) -> None:
    door, ids = lenient(server.door), [*range(300)]
    assert door.admit(request(*ids), {}).prompt_ids == tuple(range(255))
    assert door.admit(request(*ids, new=0), {}).prompt_ids == tuple(range(256))


def test_nothing_is_admitted_before_the_engine_is_there(fresh_server: ScriptedServer) -> None:
    with pytest.raises(EngineDead, match="starting"):
        fresh_server.door.admit(request(5), {})
    assert fresh_server.door.weight_version == "default"


def test_the_weight_version_is_the_engines(server: ScriptedServer) -> None:
    assert server.door.weight_version == "v7"


def test_ids_are_new_each_time() -> None:
    assert len({new_rid("x") for _ in range(100)}) == 100
    assert new_rid("HEALTH_CHECK_").startswith("HEALTH_CHECK_")
