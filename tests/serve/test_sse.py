# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, byte for byte."""

from __future__ import annotations

import asyncio
import re
import selectors
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tetrarch.core.errors import EngineDead
from tetrarch.serve.sse import EventStream, event

DEATH = EngineDead("gone", why="killed", fix="restart")


DONE = b"data: [DONE]\n\n"
STREAM = re.compile(rb"(data: [^\n]+\n\n)+data: \[DONE\]\n\n")


class _HastyLoop(asyncio.SelectorEventLoop):
    """Where nothing is to be done before a timer, it is that time already."""

    def __init__(self) -> None:
        super().__init__(_Impatient(self))
        self.skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


class _Impatient(selectors.SelectSelector):
    def __init__(self, loop: _HastyLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.skipped += timeout
        return ready


def sent(
    events: AsyncGenerator[bytes, None],
    *,
    flat: bool = True,
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> tuple[Any, bytes]:
    """Run a stream to its end; return its start and its body."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        stream = await EventStream.open(events, flat=flat)
        await stream({}, send, send)  # type: ignore[arg-type]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
    assert [message.get("more_body") for message in messages[1:-1]] == [True] * len(messages[1:-1])
    return messages[0], b"".join(message["body"] for message in messages[1:])


def test_an_event_is_one_line_of_json() -> None:
    assert event({"text": "two\nlines"}) == b'data: {"text":"two\\nlines"}\n\n'


def test_a_stream_is_events_and_done() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(1)
        yield event(2) + event(3)

    start, body = sent(events())
    assert body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


@pytest.mark.parametrize("foreign", [b": ping\n\n", b"event: x\ndata: 1\n\n", b"\n", b"id: 1\n\n"])
def test_the_grammar_knows_what_is_no_event(foreign: bytes) -> None:
    assert STREAM.fullmatch(event(1) + event("a\nb") + DONE)
    for body in (foreign + event(1) + DONE, event(1) + foreign + DONE, event(1) + DONE + foreign):
        assert not STREAM.fullmatch(body)


def test_hours_of_silence_bring_no_ping() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(1)
        for _ in range(3):
            await asyncio.sleep(3600)
            yield event(2)

    began = time.monotonic()
    _, body = sent(events(), loop=_HastyLoop)
    assert time.monotonic() - began < 5
    assert body == event(1) + 3 * event(2) + DONE


def test_a_timer_would_be_seen() -> None:
    """The control of the test above: time does pass, and whatever it sets off is run."""
    fired: list[float] = []

    async def events() -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        loop.call_later(15, lambda: fired.append(loop.time()))
        await asyncio.sleep(3600)
        yield event(1)

    sent(events(), loop=_HastyLoop)
    assert len(fired) == 1


def test_a_failure_before_the_first_event_is_raised() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise DEATH
        yield b""

    with pytest.raises(EngineDead):
        asyncio.run(EventStream.open(events(), flat=True))


@pytest.mark.parametrize("flat", [True, False])
def test_a_failure_on_the_way_is_an_event(flat: bool) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield event(1)
        raise DEATH

    _, body = sent(events(), flat=flat)
    lines = body.split(b"\n\n")
    assert lines[1].startswith(b'data: {"error":{')
    assert (b'"object":"error"' in lines[1]) is flat
    assert b'"code":503' in lines[1]
    assert lines[2] == b"data: [DONE]"


def test_a_client_that_goes_closes_the_generator() -> None:
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield event(1)
            yield event(2)
        finally:
            closed.append(True)

    async def broken(_: Any) -> None:
        raise BrokenPipeError

    async def run() -> None:
        stream = await EventStream.open(events(), flat=True)
        await stream({}, broken, broken)  # type: ignore[arg-type]

    with pytest.raises(BrokenPipeError):
        asyncio.run(run())
    assert closed == [True]
