# SPDX-License-Identifier: Apache-2.0
"""The outputs of one HTTP request, from the engine's deltas to text that may be sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from tetrarch.core.log import get_logger
from tetrarch.engine.acceptance import Acceptance
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest, WeightSpan
from tetrarch.engine.stream import OutputText
from tetrarch.engine.text import Tokenizer
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.door import Door
from tetrarch.serve.errors import Failure, HttpError, busy_headers, error_object
from tetrarch.serve.mailbox import Mailbox
from tetrarch.serve.metrics import Metrics, Timeline

__all__ = ["Generation", "Output", "Piece", "generate"]

_SAME: Mapping[str, str] = {}
_NONE: Mapping[str, Sequence[str]] = {}
_log = get_logger(__name__)
CLIENT_GONE = 499
"""Status of a request whose client hung up; nobody receives it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new about an output since the last piece."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    is_first: bool


class Output:
    """One output as it grows: everything so far, and the last piece of it."""

    def __init__(self, index: int, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self.index, self.request = index, request
        self._reader = OutputText(tokenizer, request.sampling, request.prompt_ids)
        self._sent_chars = self._sent_tokens = self._sent_pieces = 0
        self.timeline = Timeline()
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.num_cached = self.num_retractions = 0
        self.versions: tuple[WeightSpan, ...] = ()
        self.times: dict[str, float] = {}
        self.acceptance: Acceptance | None = None

    @property
    def failure(self) -> Failure | None:
        """Why it ended although nobody asked for that; `None` where it did not."""
        if self.finish is None or self.finish.kind != "abort" or self.finish.status is None:
            return None
        return _failure(self.finish, self.finish.status)

    @property
    def error(self) -> dict[str, Any] | None:
        """The failure as an error object."""
        return None if self.failure is None else error_object(self.failure, flat=False)

    def push(self, delta: Delta) -> None:
        """Take what the engine says."""
        self.text += self._reader.push(delta.token_ids, delta.finish)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish
        self.num_cached, self.num_retractions = delta.num_cached, delta.num_retractions
        self.versions, self.times = delta.versions, delta.times
        self.acceptance = delta.acceptance

    def piece(self) -> Piece:
        """Return what has come since the last call."""
        piece = Piece(
            self.text[self._sent_chars :],
            self.token_ids[self._sent_tokens :],
            self.logprobs[self._sent_tokens :],
            is_first=self._sent_pieces == 0,
        )
        self._sent_chars, self._sent_tokens = len(self.text), len(self.token_ids)
        self._sent_pieces += 1
        return piece


class Generation:
    """The outputs of an HTTP request in flight; made by `generate`.

    An output that fails ends alone, as an abort that says why. Where all fail, the request does.
    """

    def __init__(self, mailbox: Mailbox, outputs: Sequence[Output], metrics: Metrics) -> None:
        self.outputs = list(outputs)
        self._mailbox, self._metrics = mailbox, metrics
        self._by_rid = {output.request.rid: output for output in outputs}
        self._num_failed = 0

    @property
    def is_done(self) -> bool:
        """All outputs have finished."""
        return all(output.finish is not None for output in self.outputs)

    async def advance(self) -> list[Output]:
        """Wait for news; return the outputs that have grown or finished, in request order.

        Raises:
            HttpError: The last output failed, like all others.
            EngineDead: The engine ended.
        """
        grown: dict[int, Output] = {}
        for delta in await self._mailbox.take():
            output = self._by_rid[delta.rid]
            output.push(delta)
            self._metrics.observe(delta, of=output.request, timeline=output.timeline)
            self._check(output)
            grown[output.index] = output
        return [grown[index] for index in sorted(grown)]

    def _check(self, output: Output) -> None:
        if (failure := output.failure) is None:
            return
        if failure.status >= 500:
            _log.warning("request %s failed: %s", output.request.rid, failure.message)
        self._num_failed += 1
        if self._num_failed == len(self.outputs):
            raise HttpError(failure)

    async def complete(self) -> list[Output]:
        """Wait for all outputs, and return them.

        Raises:
            HttpError: All outputs failed.
            EngineDead: The engine ended.
        """
        while not self.is_done:
            await self.advance()
        return self.outputs


@asynccontextmanager
async def generate(
    door: Door,
    http: Request,
    *,
    rid: str,
    requests: Sequence[GenerateRequest],
    names: Mapping[str, str] = _SAME,
    groups: Mapping[str, Sequence[str]] = _NONE,
) -> AsyncGenerator[Generation, None]:
    """Send requests to the engine, and free whatever they still hold at the end.

    The end also comes when the client hangs up: the body of `http` has been read, so the next
    thing its connection can say is that it is gone.

    Args:
        door: The server.
        http: The HTTP request.
        rid: Its public id.
        requests: One for each output.
        names: What the client calls the fields that a refusal may name.
        groups: Further ids to abort by, and the outputs they stand for.

    Raises:
        EngineDead: There is no engine to send to.
        RequestError: A request can never be served; none was sent.
    """
    admitted = [door.admit(each, names) for each in requests]
    outputs = [Output(index, each, door.tokenizer) for index, each in enumerate(admitted)]
    mailbox = door.client.submit(rid, admitted, groups=groups)
    watch = asyncio.create_task(_end_with_connection(http.receive, mailbox))
    try:
        yield Generation(mailbox, outputs, door.metrics)
    finally:
        watch.cancel()
        mailbox.close()


def _failure(finish: FinishReason, status: int) -> Failure:
    """An abort that carries a status is a failure; without, it was asked for."""
    message = finish.message or "the request was aborted"
    kind = "Bad Request" if status == 400 else finish.code or ""
    return Failure(
        status=status,
        message=message,
        kind=kind,
        param=finish.param,
        headers=busy_headers(status),
    )


async def _end_with_connection(receive: Receive, mailbox: Mailbox) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.close()
    mailbox.fail(HttpError(Failure(status=CLIENT_GONE, message="the client hung up")))
