# SPDX-License-Identifier: Apache-2.0
"""What `/v1/completions` and `/v1/chat/completions` have in common: the way from job to answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import GenerateRequest, SamplingParams, fan_out
from tetrarch.serve.body import json_response
from tetrarch.serve.door import Door
from tetrarch.serve.fields import StreamOptions, check_num_outputs
from tetrarch.serve.openai_types import Choice, ObjectName, OpenAIBody, Reply, Usage, usage_of
from tetrarch.serve.outputs import Generation, Output, generate
from tetrarch.serve.sse import EventStream, event

__all__ = [
    "WHOLE",
    "Job",
    "Logprobs",
    "Writer",
    "answer",
    "check_prompt",
    "fan_out_prompts",
]

WHOLE = 1 << 30
"""Tokens a delta gathers when nobody watches the output grow."""


class Writer(Protocol):
    """Turns an output into choices."""

    def whole(self, output: Output) -> Choice:
        """Return the finished output."""
        ...

    def pieces(self, output: Output) -> Sequence[Choice]:
        """Return what is new about it, as choices of one chunk each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Which logprobs a request wants, in the engine's words."""

    wanted: bool = False
    start: int = -1
    top: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, read and checked."""

    kind: ObjectName
    body: OpenAIBody
    rid: str
    requests: tuple[GenerateRequest, ...]
    names: Mapping[str, str]  # what this endpoint calls the engine's fields
    num_choices: int  # for each prompt

    @property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """The id of each prompt of a batch, and those of its choices; what `fan_out_prompts` made.

        The one prompt of a request that has no more goes by the request's own id.
        """
        size, rids = self.num_choices, [request.rid for request in self.requests]
        if len(rids) == size:
            return {}
        groups = [rids[at : at + size] for at in range(0, len(rids), size)]
        return {_prompt_rid(self.rid, index): group for index, group in enumerate(groups)}


def fan_out_prompts(
    rid: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, logprobs: Logprobs
) -> tuple[GenerateRequest, ...]:
    """Return one request for each output, prompt-major.

    Raises:
        RequestError: There are too many.
    """
    check_num_outputs(len(prompts) * sampling.n)
    return tuple(
        request
        for index, ids in enumerate(prompts)
        for request in fan_out(
            GenerateRequest(
                rid=rid if len(prompts) == 1 else _prompt_rid(rid, index),
                prompt_ids=tuple(ids),
                sampling=sampling,
                return_logprobs=logprobs.wanted,
                logprob_start=logprobs.start,
                top_logprobs=logprobs.top,
            )
        )
    )


def _prompt_rid(rid: str, index: int) -> str:
    return f"{rid}_{index}"


async def answer(door: Door, http: Request, job: Job, writer: Writer) -> Response:
    """Run a job and answer, whole or as a stream."""
    envelope = _Envelope(door, job)
    if job.body.stream:
        return await EventStream.open(_events(door, http, job, writer, envelope), flat=True)
    async with _started(door, http, job) as generation:
        outputs = await generation.complete()
    choices = [writer.whole(output) for output in outputs]
    return json_response(envelope.around(choices, _usage(generation, job)))


async def _events(
    door: Door, http: Request, job: Job, writer: Writer, envelope: _Envelope
) -> AsyncGenerator[bytes, None]:
    options = job.body.stream_options or StreamOptions()
    async with _started(door, http, job) as generation:
        while not generation.is_done:
            chunks: list[bytes] = []
            for output in await generation.advance():
                usage = _usage(generation, job) if options.continuous_usage_stats else None
                for choice in writer.pieces(output):
                    chunks.append(event(envelope.around([choice], usage)))
            yield b"".join(chunks)
        if options.include_usage:
            yield event(envelope.around([], _usage(generation, job)))


def _started(door: Door, http: Request, job: Job) -> AbstractAsyncContextManager[Generation]:
    return generate(
        door, http, rid=job.rid, requests=job.requests, names=job.names, groups=job.groups
    )


def _usage(generation: Generation, job: Job) -> Usage:
    return usage_of(generation.outputs, num_choices=job.num_choices)


class _Envelope:
    """What all chunks of one response say alike."""

    def __init__(self, door: Door, job: Job) -> None:
        self._door = door
        self._rid = job.rid
        self._kind: ObjectName = job.kind
        self._model = job.body.model or door.plan.model.served_name
        self._created = int(time.time())

    def around(self, choices: Sequence[Choice], usage: Usage | None) -> Reply:
        return Reply(
            id=self._rid,
            object=self._kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            metadata={"weight_version": self._door.weight_version},
        )


def check_prompt(ids: Sequence[int], key: str) -> Sequence[int]:
    """Return a prompt that has tokens.

    Raises:
        RequestError: It has none.
    """
    if not ids:
        raise RequestError(
            f"{key} is empty",
            why="it has no tokens, and the first output token needs one before it",
            fix=f"send at least one token in {key}",
            param=key,
        )
    return ids
