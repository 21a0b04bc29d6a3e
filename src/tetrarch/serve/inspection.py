# SPDX-License-Identifier: Apache-2.0
"""Look at the weights: one by name, all by checksum; and name their version."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.engine.actions import CheckWeights, GetWeights, SetVersion, WeightCheck
from tetrarch.serve.body import json_response, read_control
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Ignored, Meta
from tetrarch.serve.reply import relay, reply_response
from tetrarch.serve.weights import Choice, choose

__all__ = [
    "CheckBody",
    "VersionBody",
    "WeightBody",
    "get_weights_by_name",
    "update_weight_version",
    "weights_checker",
]


class WeightBody(msgspec.Struct, kw_only=True, frozen=True):
    """`/get_weights_by_name`."""

    name: Annotated[str, Meta(description="As in a checkpoint.")]
    truncate_size: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Most rows; default 100.")
    ] = None


class CheckBody(msgspec.Struct, kw_only=True, frozen=True):
    """`/weights_checker`."""

    action: Annotated[
        WeightCheck | None,
        Meta(
            description="checksum (default) reports digests; snapshot remembers them, compare "
            "fails where they differ from that; reset_tensors overwrites every weight with noise."
        ),
    ] = None
    skip_tensor_list: Annotated[
        list[str] | None, Meta(description="Names that compare leaves out.")
    ] = None
    selector: Choice = None
    allow_quant_error: Ignored = None


class VersionBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /update_weight_version`."""

    new_version: Annotated[str, Meta(max_length=256, description="Name of the weights.")]
    abort_all_requests: Annotated[bool | None, Meta(description="Default true.")] = None


async def get_weights_by_name(door: Door, http: Request) -> Response:
    """Report a weight's first rows as nested lists, or answer 400 where there is no such weight."""
    body = await read_control(http, WeightBody)
    size = 100 if body.truncate_size is None else body.truncate_size
    reply = await door.client.call(partial(GetWeights, name=body.name, truncate_size=size))
    return json_response(reply.payload["values"]) if reply.ok else reply_response(reply)


async def weights_checker(door: Door, http: Request) -> Response:
    """Compare weights by digest, here or with what `tetrarch checksum` says of a folder."""
    body = await read_control(http, CheckBody)
    selector = choose(door, body.selector)
    action: WeightCheck = body.action or "checksum"
    reply = await door.client.call(
        partial(
            CheckWeights,
            action=action,
            skip=tuple(body.skip_tensor_list or ()),
            selector=selector,
        )
    )
    if action != "checksum" or not reply.ok:
        return reply_response(reply)
    ranks = [{"rank": 0, **reply.payload}]
    whole = reply.payload["checksum"]
    return reply_response(reply, {"ranks": ranks, "per_engine_checksum": whole})


async def update_weight_version(door: Door, http: Request) -> Response:
    """Name the weights, for instance after a trainer's step."""
    body = await read_control(http, VersionBody)
    message = partial(
        SetVersion,
        version=body.new_version,
        abort_all_requests=body.abort_all_requests is not False,
    )
    return await relay(door, message)
