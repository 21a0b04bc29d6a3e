# SPDX-License-Identifier: Apache-2.0
"""Weights that a trainer broadcasts: joining its process group, and receiving from it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import DestroyGroup, InitGroup, UpdateFromDistributed
from tetrarch.serve.body import read_control
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Ignored, Meta
from tetrarch.serve.reply import relay, relay_update
from tetrarch.serve.weights import (
    AbortFirst,
    Choice,
    LastCall,
    Version,
    choose,
)

__all__ = [
    "DestroyGroupBody",
    "DistributedBody",
    "InitGroupBody",
    "destroy_weights_update_group",
    "init_weights_update_group",
    "update_weights_from_distributed",
]

GROUP = "weight_update_group"
_Name = Annotated[
    Annotated[str, Meta(min_length=1, max_length=256)] | None,
    Meta(description=f"Default {GROUP}."),
]
_Size = Annotated[int, Meta(ge=0)]


class InitGroupBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /init_weights_update_group`."""

    master_address: Annotated[str, Meta(description="Where the trainer's rank 0 listens.")]
    master_port: Annotated[int, Meta(ge=1, le=65535, description="Of the same store.")]
    rank_offset: Annotated[
        int, Meta(ge=1, le=65535, description="Rank of this server in the group; the sender is 0.")
    ]
    world_size: Annotated[
        int, Meta(ge=2, le=65536, description="Ranks of the group, the sender's among them.")
    ]
    group_name: _Name = None
    backend: Annotated[
        Literal["nccl", "gloo"] | None, Meta(description="Default nccl on a GPU, gloo on a CPU.")
    ] = None


class DestroyGroupBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /destroy_weights_update_group`."""

    group_name: _Name = None


class DistributedBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /update_weights_from_distributed`."""

    names: Annotated[list[str], Meta(description="In the order in which they are broadcast.")]
    dtypes: Annotated[
        list[str],
        Meta(description="Of each as torch spells it: bfloat16, float8_e4m3fn, torch.uint8."),
    ]
    shapes: Annotated[list[list[_Size]], Meta(description="Of each.")]
    group_name: _Name = None
    load_format: Annotated[
        Literal["flattened_bucket"] | None, Meta(description="Null, or flattened_bucket.")
    ] = None
    flush_cache: LastCall = None
    abort_all_requests: AbortFirst = None
    weight_version: Version = None
    selector: Choice = None
    torch_empty_cache: Ignored = None


async def init_weights_update_group(door: Door, http: Request) -> Response:
    """Join a trainer's process group; answers once all its ranks have met."""
    body = await read_control(http, InitGroupBody)
    if body.rank_offset + door.plan.parallel.tp > body.world_size:
        raise RequestError(
            f"rank_offset {body.rank_offset} lies outside of a world_size of {body.world_size}",
            why=f"this server takes {door.plan.parallel.tp} ranks from rank_offset on",
            fix="send the number of all ranks, the trainer's among them, as world_size",
            param="rank_offset",
        )
    natural = "gloo" if door.plan.device.torch_device == "cpu" else "nccl"
    message = partial(
        InitGroup,
        master_address=body.master_address,
        master_port=body.master_port,
        rank_offset=body.rank_offset,
        world_size=body.world_size,
        group_name=body.group_name or GROUP,
        backend=body.backend or natural,
    )
    return await relay(door, message)


async def destroy_weights_update_group(door: Door, http: Request) -> Response:
    """Leave a process group, or end its joining: that call is answered with 400."""
    body = await read_control(http, DestroyGroupBody)
    return await relay(door, partial(DestroyGroup, group_name=body.group_name or GROUP))


async def update_weights_from_distributed(door: Door, http: Request) -> Response:
    """Receive tensors by broadcast, then do as /update_weights_from_tensor."""
    body = await read_control(http, DistributedBody)
    selector = choose(door, body.selector)
    for name, listed in (("dtypes", body.dtypes), ("shapes", body.shapes)):
        if len(listed) != len(body.names):
            raise RequestError(
                f"{name} has {len(listed)} entries, and names has {len(body.names)}",
                why="each tensor needs a name, a dtype and a shape",
                fix="send three lists of the same length",
                param=name,
            )
    message = partial(
        UpdateFromDistributed,
        names=tuple(body.names),
        dtypes=tuple(body.dtypes),
        shapes=tuple(map(tuple, body.shapes)),
        group_name=body.group_name or GROUP,
        load_format=body.load_format,
        weight_version=body.weight_version,
        flush_cache=body.flush_cache is not False,
        abort_all_requests=bool(body.abort_all_requests),
        selector=selector,
    )
    return await relay_update(door, message, source="distributed")
