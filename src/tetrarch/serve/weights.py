# SPDX-License-Identifier: Apache-2.0
"""Replace the weights: from a folder, or by tensors that a trainer sends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import (
    BeginUpdate,
    EndUpdate,
    PostProcess,
    Selector,
    UpdateFromDisk,
    UpdateFromTensors,
)
from tetrarch.serve.body import read_control
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Ignored, Meta
from tetrarch.serve.folders import check_folder
from tetrarch.serve.ranks import decode_ranks
from tetrarch.serve.reply import relay, relay_update

__all__ = [
    "AbortFirst",
    "BeginBody",
    "Choice",
    "DiskBody",
    "EmptyBody",
    "LastCall",
    "PostProcessBody",
    "TensorBody",
    "Version",
    "begin_weight_update",
    "choose",
    "end_weight_update",
    "post_process_weights",
    "update_weights_from_disk",
    "update_weights_from_tensor",
]

Choice = Annotated[
    Selector | None,
    Meta(
        description="Whose weights: target, draft, or all (default). Tensors of the other are left "
        "out. The draft is there under --speculative-algorithm; its names are the checkpoint's."
    ),
]
Version = Annotated[
    Annotated[str, Meta(max_length=256)] | None,
    Meta(description="Name of the new weights; default: updates are counted."),
]
AbortFirst = Annotated[bool | None, Meta(description="End all requests first.")]
LastCall = Annotated[
    bool | None,
    Meta(description="Default true: the last call of this update, unless one was begun."),
]


class DiskBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /update_weights_from_disk`."""

    model_path: Annotated[str, Meta(description="A local folder with config and safetensors.")]
    load_format: Annotated[
        Literal["auto", "safetensors"] | None, Meta(description="There is only one.")
    ] = None
    weight_version: Version = None
    flush_cache: Annotated[
        bool | None,
        Meta(
            description="Default true: running requests keep their tokens and are computed again. "
            "False: they keep keys and values of the old weights, and so does the prefix cache."
        ),
    ] = None
    abort_all_requests: AbortFirst = None
    keep_pause: Annotated[bool | None, Meta(description="Stay paused afterwards.")] = None
    atomic: Annotated[
        bool | None,
        Meta(
            description="True demands that a failure can be undone, false renounces it; default: "
            "where host memory has room, as the answer's atomic says."
        ),
    ] = None
    dry_run: Annotated[bool | None, Meta(description="Check headers, change nothing.")] = None
    manifest: Annotated[Any, Meta(description="Refused unless null.")] = None
    is_async: Ignored = None
    torch_empty_cache: Ignored = None
    recapture_cuda_graph: Ignored = None
    token_step: Ignored = None


class TensorBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /update_weights_from_tensor`."""

    serialized_named_tensors: Annotated[
        list[str],
        Meta(description="For each tensor-parallel rank the base64 of what torch pickles."),
    ]
    load_format: Annotated[
        str | None, Meta(description="direct (default) or flattened_bucket.")
    ] = None
    flush_cache: LastCall = None
    abort_all_requests: AbortFirst = None
    weight_version: Version = None
    selector: Choice = None
    torch_empty_cache: Ignored = None
    disable_draft_model: Annotated[
        bool | None, Meta(description="True: as the selector target.")
    ] = None


class BeginBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /begin_weight_update`."""

    selector: Choice = None
    atomic: Annotated[bool | None, Meta(description="As of /update_weights_from_disk.")] = None


class EmptyBody(msgspec.Struct, kw_only=True, frozen=True):
    """Nothing is read."""


class PostProcessBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /post_process_weights`."""

    restore_weights_before_load: Annotated[
        bool | None, Meta(description="Begin an update, unless one is open.")
    ] = None
    post_process_quantization: Annotated[
        bool | None, Meta(description="End the open update, if any.")
    ] = None


async def update_weights_from_disk(door: Door, http: Request) -> Response:
    """Replace all weights by those of a folder, or answer 400 and serve the old ones."""
    body = await read_control(http, DiskBody)
    if body.manifest is not None:
        raise RequestError(
            "manifest is not supported",
            why="what a folder holds is read from the headers of its safetensors",
            fix="leave manifest out, or send null",
            param="manifest",
        )
    await asyncio.to_thread(
        check_folder, body.model_path, root=door.plan.serve.weights_root, served=door.model_path
    )
    message = partial(
        UpdateFromDisk,
        path=body.model_path,
        weight_version=body.weight_version,
        flush_cache=body.flush_cache is not False,
        abort_all_requests=bool(body.abort_all_requests),
        keep_pause=bool(body.keep_pause),
        atomic=body.atomic,
        dry_run=bool(body.dry_run),
    )
    if body.dry_run:
        return await relay(door, message)
    return await relay_update(door, message, source="disk")


async def update_weights_from_tensor(door: Door, http: Request) -> Response:
    """Take tensors. What is complete is written; the rest waits for further calls."""
    body = await read_control(http, TensorBody)
    selector = choose(door, body.selector, disable_draft_model=body.disable_draft_model)
    ranks = await asyncio.to_thread(
        decode_ranks, body.serialized_named_tensors, num_ranks=door.plan.parallel.tp
    )
    message = partial(
        UpdateFromTensors,
        data=ranks[0],
        load_format=body.load_format,
        weight_version=body.weight_version,
        flush_cache=body.flush_cache is not False,
        abort_all_requests=bool(body.abort_all_requests),
        selector=selector,
    )
    return await relay_update(door, message, source="tensor")


async def begin_weight_update(door: Door, http: Request) -> Response:
    """Begin an update by tensors: nothing is computed until /end_weight_update."""
    body = await read_control(http, BeginBody)
    selector = choose(door, body.selector)
    return await relay(door, partial(BeginUpdate, atomic=body.atomic, selector=selector))


async def end_weight_update(door: Door, http: Request) -> Response:
    """End the update, or answer 400 where layers are half-complete."""
    await read_control(http, EmptyBody)
    return await relay_update(door, EndUpdate, source="tensor")


async def post_process_weights(door: Door, http: Request) -> Response:
    """Do what older trainers say for begin and end; both may be repeated."""
    body = await read_control(http, PostProcessBody)
    message = partial(
        PostProcess,
        begins=bool(body.restore_weights_before_load),
        ends=bool(body.post_process_quantization),
    )
    return await relay(door, message)


def choose(
    door: Door, selector: Selector | None, *, disable_draft_model: bool | None = None
) -> Selector:
    """Return whose weights a call is about.

    Raises:
        RequestError: It is about the draft, and there is none, or it is disabled by the same call.
    """
    if selector == "draft" and door.plan.spec is None:
        raise RequestError(
            "selector is draft, and no draft model is served",
            why="the call would reach nothing",
            fix="send target or all, or leave selector out",
            param="selector",
        )
    if selector == "draft" and disable_draft_model:
        raise RequestError(
            "selector is draft, and disable_draft_model leaves it out",
            why="nothing would be updated",
            fix="send one of the two",
            param="disable_draft_model",
        )
    return "target" if disable_draft_model else selector or "all"
