# SPDX-License-Identifier: Apache-2.0
"""Is it alive, what is it doing: health, readiness, load and metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import TetrarchError
from tetrarch.engine.messages import Heartbeat
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.serve.body import json_response
from tetrarch.serve.door import Door, new_rid
from tetrarch.serve.errors import Failure, busy_headers, failure_response
from tetrarch.serve.outputs import generate

__all__ = ["health", "health_generate", "loads", "metrics", "ready"]

PROBE_TIMEOUT_S = 20.0
"""A probe that sees no token for so long answers 503."""


async def health(door: Door, _: Request) -> Response:
    """Say whether the engine lives: 200 or 503, at once, without a forward."""
    return _status(is_healthy=door.client.is_alive)


async def ready(door: Door, http: Request) -> Response:
    """Say whether a request would run now: 503 also while paused, updating or without weights."""
    return _idle(door, http) or _status(is_healthy=door.client.is_alive)


async def health_generate(door: Door, http: Request) -> Response:
    """Run one token through the engine: 200 when any output has been seen since, else 503.

    Where none could run, because the engine is paused, takes an update by tensors, or lacks weights
    or memory for keys and values, the answer is 503 at once, with the reason as the error's `type`.
    """
    if (refusal := _idle(door, http)) is not None:
        return refusal
    # A busy server need not reach our token: any other shows the same, and watchdogs wait 5 s.
    output = door.client.next_output()
    probe = asyncio.create_task(_probe(door, http))
    try:
        await asyncio.wait(
            (output, probe), timeout=PROBE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        probe.cancel()
    return _status(is_healthy=output.done())


async def _probe(door: Door, http: Request) -> None:
    rid = new_rid("HEALTH_CHECK_")
    request = GenerateRequest(
        rid=rid,
        prompt_ids=(0,),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        is_probe=True,
    )
    with suppress(TetrarchError):  # no token has come, which says it all
        async with generate(door, http, rid=rid, requests=[request]) as generation:
            await generation.complete()


def _idle(door: Door, http: Request) -> Response | None:
    """Return why an engine that lives runs nothing, if so."""
    code = _state(door.client.load)
    if not door.client.is_alive or code == "ready":
        return None
    failure = Failure(
        status=503, message=f"nothing runs: {code}", kind=code, headers=busy_headers(503)
    )
    return failure_response(failure, path=http.url.path)


def _state(load: Heartbeat) -> str:
    """Return `ready`, or why requests wait or are refused."""
    if load.state != "ready":
        return load.state
    return "paused" if load.is_paused else "updating" if load.is_updating else "ready"


def _status(*, is_healthy: bool) -> Response:
    if is_healthy:
        return Response(status_code=200)
    return Response(status_code=503, headers=busy_headers(503))


async def loads(door: Door, _: Request) -> Response:
    """Report how much the engine has to do, one entry a data-parallel rank.

    Without an engine the answer is 503: who waits for idle would read its last counts for ever.
    """
    load, client = door.client.load, door.client
    client.check_alive()
    # What was sent a moment ago is not in the engine's last report, but it is there.
    num_waiting = max(load.num_waiting, client.num_pending - load.num_running)
    entry: dict[str, Any] = {
        "dp_rank": 0,
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": num_waiting,
        "num_total_reqs": load.num_running + num_waiting,
        "num_paused_reqs": load.num_paused,
        "state": _state(load),
        "num_used_tokens": load.num_used_tokens,
        "num_cached_tokens": load.num_cached_tokens,
        "max_total_num_tokens": load.max_total_tokens,
        "token_usage": load.num_used_tokens / max(load.max_total_tokens, 1),
        "gen_throughput": door.metrics.throughput.rate,
    }
    return json_response({"dp_rank_count": 1, "loads": [entry]})


async def metrics(door: Door, _: Request) -> Response:
    """Report counters in Prometheus' text format."""
    return Response(door.metrics.render(door.client.load), media_type=CONTENT_TYPE_LATEST)
