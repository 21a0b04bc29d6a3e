# SPDX-License-Identifier: Apache-2.0
"""Lend memory to somebody else, such as a trainer on the same device, and take it again."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import Release, Resume
from tetrarch.memory.slots import Region
from tetrarch.serve.body import read_control
from tetrarch.serve.door import Door
from tetrarch.serve.fields import Meta
from tetrarch.serve.reply import relay

__all__ = [
    "ReleaseBody",
    "ResumeBody",
    "release_memory_occupation",
    "resume_memory_occupation",
]

_Tags = Annotated[
    list[str] | str | None,
    Meta(
        description=f"Of {', '.join(Region)}: a list, or one text with commas. Default: all three."
    ),
]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class ReleaseBody(msgspec.Struct, kw_only=True, frozen=True):
    """`/release_memory_occupation`."""

    tags: _Tags = None
    wait_s: Annotated[
        _Seconds | None, Meta(description="Seconds to wait for requests; default 0, up to 3600.")
    ] = None
    cpu_backup: Annotated[
        bool | None,
        Meta(
            description="Keep the weights, so that resuming alone brings them back. Default: as "
            "--enable-weights-cpu-backup says."
        ),
    ] = None


class ResumeBody(msgspec.Struct, kw_only=True, frozen=True):
    """`/resume_memory_occupation`."""

    tags: _Tags = None


async def release_memory_occupation(door: Door, http: Request) -> Response:
    """Give memory back; answers once it is, with the bytes of each tag. 400 while requests run."""
    body = await read_control(http, ReleaseBody)
    message = partial(
        Release, tags=_tags(body.tags), wait_s=body.wait_s or 0.0, backup=body.cpu_backup
    )
    return await relay(door, message)


async def resume_memory_occupation(door: Door, http: Request) -> Response:
    """Take memory again. Weights must then be updated, unless they were kept."""
    body = await read_control(http, ResumeBody)
    return await relay(door, partial(Resume, tags=_tags(body.tags)))


def _tags(value: list[str] | str | None) -> tuple[str, ...]:
    tags = value.split(",") if isinstance(value, str) else value
    if tags is None:
        return ()
    if not tags:
        raise RequestError(
            "tags is an empty list",
            why="nothing would be released or resumed; for all, tags is left out",
            fix=f"send some of {', '.join(Region)}, or leave tags out for all",
            param="tags",
        )
    unknown = [tag for tag in tags if tag not in list(Region)]
    if unknown:
        raise RequestError(
            f"tags holds {unknown[0]!r}",
            why=f"memory is released and resumed as {', '.join(Region)}",
            fix="send some of these, or leave tags out for all",
            param="tags",
        )
    return tuple(dict.fromkeys(tags))
