# SPDX-License-Identifier: Apache-2.0
"""`POST /generate`: the engine's own words, for clients that want ids, logprobs and counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tetrarch.core.errors import RequestError
from tetrarch.engine.request import GenerateRequest, fan_out
from tetrarch.engine.sampling import parse_sampling
from tetrarch.serve.body import json_response, read_body
from tetrarch.serve.door import Door, new_rid
from tetrarch.serve.fields import NATIVE_LATER, Meta, check_num_outputs, read_ids
from tetrarch.serve.meta import LogprobLists, meta_info
from tetrarch.serve.openai import WHOLE, check_prompt
from tetrarch.serve.outputs import Generation, Output, generate
from tetrarch.serve.sse import EventStream, event

__all__ = ["GenerateBody", "generate_native"]


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """`POST /generate`. In a batch, most fields may be a list with one value a prompt."""

    text: Annotated[str | list[str] | None, Meta(description="The prompt; or input_ids.")] = None
    input_ids: Annotated[list[Any] | None, Meta(description="The prompt's token ids.")] = None
    sampling_params: Annotated[
        dict[str, Any] | list[dict[str, Any] | None] | None,
        Meta(description="See the table below; an unknown key is refused."),
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    incremental: Annotated[
        bool | None,
        Meta(description="Events hold what is new, not everything so far. Default: the server's."),
    ] = None
    rid: Annotated[
        str | list[str] | None, Meta(description="Request id; rid_0, rid_1, ... in a batch.")
    ] = None
    return_logprob: Annotated[
        bool | list[bool | None] | None, Meta(description="Report logprobs.")
    ] = None
    logprob_start_len: Annotated[
        int | list[int | None] | None,
        Meta(description="First prompt position to report; -1: outputs only."),
    ] = None
    top_logprobs_num: Annotated[
        int | list[int | None] | None, Meta(description="Alternatives to report.")
    ] = None
    token_ids_logprob: Annotated[
        list[Any] | None, Meta(description="Ids whose logprob is reported at every position.")
    ] = None
    return_text_in_logprobs: Annotated[
        bool | None, Meta(description="Third element of a logprob triple: the token's text.")
    ] = None
    return_prompt_token_ids: Annotated[
        bool | None, Meta(description="Add prompt_token_ids to each output.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One `/generate`, read and checked."""

    door: Door
    body: GenerateBody
    rid: str
    rids: Sequence[str]  # of the prompts
    outputs: Sequence[tuple[GenerateRequest, ...]]  # of each prompt
    is_batch: bool

    @property
    def requests(self) -> list[GenerateRequest]:
        """All outputs, prompt-major."""
        return [each for outputs in self.outputs for each in outputs]

    @property
    def is_list(self) -> bool:
        """Whether to answer with a list."""
        return self.is_batch or len(self.outputs[0]) > 1

    @property
    def names(self) -> dict[str, str]:
        """What the client calls the prompt."""
        return {} if self.body.text is None else {"input_ids": "text"}

    @property
    def is_incremental(self) -> bool:
        chosen = self.body.incremental
        return self.door.plan.serve.incremental_streaming if chosen is None else chosen


async def generate_native(door: Door, http: Request) -> Response:
    """Continue a prompt, or a batch of prompts."""
    job = _read_job(door, await read_body(http, GenerateBody, later=NATIVE_LATER))
    if job.body.stream:
        return await EventStream.open(_events(job, http), flat=False)
    async with _started(job, http) as generation:
        outputs = await generation.complete()
    replies = [_reply(job, output, is_incremental=False) for output in outputs]
    return json_response(replies if job.is_list else replies[0])


async def _events(job: _Job, http: Request) -> AsyncGenerator[bytes, None]:
    async with _started(job, http) as generation:
        while not generation.is_done:
            events: list[bytes] = []
            for output in await generation.advance():
                reply = _reply(job, output, is_incremental=job.is_incremental)
                if job.is_list:
                    reply["index"] = output.index
                events.append(event(reply))
            yield b"".join(events)


def _started(job: _Job, http: Request) -> AbstractAsyncContextManager[Generation]:
    groups = {
        rid: [each.rid for each in outputs]
        for rid, outputs in zip(job.rids, job.outputs, strict=True)
    }
    return generate(
        job.door, http, rid=job.rid, requests=job.requests, names=job.names, groups=groups
    )


def _reply(job: _Job, output: Output, *, is_incremental: bool) -> dict[str, Any]:
    piece = output.piece()
    info = meta_info(job.door, output)
    if output.request.return_logprobs:
        lists = LogprobLists(
            job.door.tokenizer.token_text if job.body.return_text_in_logprobs else _no_text,
            with_top=output.request.top_logprobs > 0,
            with_picked=bool(output.request.logprob_ids),
        )
        if piece.is_first or not is_incremental:
            info.update(lists.of_prompt(output))
        info.update(lists.of_output(piece.logprobs if is_incremental else output.logprobs))
    reply: dict[str, Any] = {
        "text": piece.text if is_incremental else output.text,
        "output_ids": piece.token_ids if is_incremental else output.token_ids,
        "meta_info": info,
    }
    if job.body.return_prompt_token_ids:
        reply["prompt_token_ids"] = output.request.prompt_ids
    return reply


def _no_text(_: int) -> None:
    return None


def _read_job(door: Door, body: GenerateBody) -> _Job:
    prompts, is_batch = _prompts(door, body)
    rid, rids = _rids(body.rid, len(prompts), is_batch=is_batch)
    lists = _PerPrompt(len(prompts), is_batch=is_batch)
    sampling = lists.of("sampling_params", body.sampling_params)
    wanted = lists.of("return_logprob", body.return_logprob)
    starts = lists.of("logprob_start_len", body.logprob_start_len)
    tops = lists.of("top_logprobs_num", body.top_logprobs_num)
    picked = _picked(body.token_ids_logprob, lists)
    interval = {} if body.stream else {"stream_interval": WHOLE}
    params = [
        parse_sampling({**(raw or {}), **interval}, vocab_size=door.plan.model.facts.vocab_size)
        for raw in sampling
    ]
    check_num_outputs(sum(each.n for each in params))
    outputs: list[tuple[GenerateRequest, ...]] = []
    for index, prompt_ids in enumerate(prompts):
        request = GenerateRequest(
            rid=rids[index], prompt_ids=tuple(prompt_ids), sampling=params[index]
        )
        if wanted[index]:
            request = msgspec.structs.replace(
                request,
                return_logprobs=True,
                logprob_start=-1 if starts[index] is None else starts[index],
                top_logprobs=tops[index] or 0,
                logprob_ids=picked[index],
            )
        outputs.append(fan_out(request))
    return _Job(door=door, body=body, rid=rid, rids=rids, outputs=outputs, is_batch=is_batch)


def _prompts(door: Door, body: GenerateBody) -> tuple[list[Sequence[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError(
            "exactly one of text and input_ids must be given",
            why="both name the prompt" if body.text is not None else "there is no prompt",
            fix="send text or input_ids",
            param="text",
        )
    if body.input_ids is not None:
        ids, is_batch = read_ids(body.input_ids, "input_ids")
        return [*ids], is_batch
    texts = [body.text] if isinstance(body.text, str) else body.text or []
    if not texts:
        raise RequestError(
            "text is not a prompt", why="the list is empty", fix="send a string", param="text"
        )
    prompts = [check_prompt(door.tokenizer.encode(text), "text") for text in texts]
    return prompts, isinstance(body.text, list)


def _rids(rid: str | list[str] | None, count: int, *, is_batch: bool) -> tuple[str, Sequence[str]]:
    """Return the id of the HTTP request, and those of its prompts."""
    if isinstance(rid, list):
        rids: list[str] = _PerPrompt(count, is_batch=is_batch).of("rid", rid)
        return rids[0] if count == 1 else new_rid(), rids
    base = rid or new_rid()
    return base, [f"{base}_{index}" for index in range(count)] if is_batch else [base]


def _picked(value: list[Any] | None, lists: _PerPrompt) -> list[tuple[int, ...]]:
    """One list of ids for all prompts, or one (or null) for each."""
    one_for_all = not any(each is None or isinstance(each, list) for each in value or ())
    chosen = [value] * lists.count if one_for_all else lists.of("token_ids_logprob", value)
    picked: list[tuple[int, ...]] = []
    for each in chosen:
        ids = cast("list[Any]", each) if isinstance(each, list) else []
        if (each is not None and not isinstance(each, list)) or any(
            type(item) is not int for item in ids
        ):
            raise RequestError(
                "token_ids_logprob is not a list of token ids",
                why="it holds something else than integers",
                fix="send a list of ids; in a batch also one list or null for each prompt",
                param="token_ids_logprob",
            )
        picked.append(tuple(ids))
    return picked


class _PerPrompt:
    """Spreads a field over the prompts of a batch."""

    def __init__(self, count: int, *, is_batch: bool) -> None:
        self.count, self._is_batch = count, is_batch

    def of(self, key: str, value: Any) -> list[Any]:
        """Return one value a prompt.

        Raises:
            RequestError: A list of another length.
        """
        if not isinstance(value, list):
            return [value] * self.count
        values = cast("list[Any]", value)
        if not self._is_batch or len(values) != self.count:
            raise RequestError(
                f"{key} has {len(values)} values, and there "
                + (f"are {self.count} prompts" if self._is_batch else "is no batch"),
                why="a list holds one value a prompt",
                fix=f"send one value of {key} for all, or as many as prompts",
                param=key,
            )
        return values
