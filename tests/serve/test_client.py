# SPDX-License-Identifier: Apache-2.0
"""The server's side of the engine: delivery, ids, aborts, and death."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest

from tetrarch.core.errors import EngineDead, RequestError
from tetrarch.engine.messages import (
    Abort,
    ControlReply,
    Flush,
    Heartbeat,
    Inbound,
    Outbound,
    Ready,
)
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest, SamplingParams
from tetrarch.serve import client as module
from tetrarch.serve.client import EngineClient, State

DEATH = EngineDead("gone", why="killed", fix="restart")
DONE = FinishReason(kind="length", length=1)
LIMITS = {"vocab_size": 9, "context_len": 8, "max_tokens": 8, "has_text": True}


class Pipe:
    """A link whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[Inbound] = []
        self.is_dead = False
        self._batches: asyncio.Queue[list[Outbound] | Exception] = asyncio.Queue()

    def send(self, message: Inbound) -> None:
        if self.is_dead:
            raise DEATH
        self.sent.append(message)

    async def receive(self) -> list[Outbound]:
        batch = await self._batches.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    async def say(self, *messages: Outbound) -> None:
        self._batches.put_nowait(list(messages))
        await settle()

    async def die(self, error: Exception = DEATH) -> None:
        self._batches.put_nowait(error)
        await settle()

    @property
    def aborts(self) -> list[Abort]:
        return [message for message in self.sent if isinstance(message, Abort)]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def with_client(test: Callable[[EngineClient, Pipe], Awaitable[None]]) -> None:
    """Run a coroutine against a client that is ready."""

    async def run() -> None:
        client, pipe = EngineClient(), Pipe()
        task = asyncio.create_task(client.run(pipe, Ready(payload={"limits": LIMITS})))
        await settle()
        await test(client, pipe)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def requests(*rids: str) -> Sequence[GenerateRequest]:
    return [GenerateRequest(rid=rid, prompt_ids=(1,), sampling=SamplingParams()) for rid in rids]


def delta(rid: str, *token_ids: int, finish: FinishReason | None = None) -> Delta:
    return Delta(rid=rid, token_ids=token_ids, finish=finish)


def test_deltas_reach_the_request_they_belong_to() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        one, two = client.submit("a", requests("a")), client.submit("b", requests("b_0", "b_1"))
        assert client.num_pending == 3
        await pipe.say(delta("b_1", 7), delta("a", 5), delta("b_0", 6), delta("a", 4, finish=DONE))
        assert [d.token_ids for d in await one.take()] == [(5,), (4,)]
        assert [(d.rid, d.token_ids) for d in await two.take()] == [("b_1", (7,)), ("b_0", (6,))]
        assert client.num_pending == 2
        assert one.open == set()

    with_client(check)


def test_a_live_id_is_refused_and_nothing_is_sent() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        mailbox = client.submit("a", requests("a_0", "a_1"), groups={"p": ["a_0", "a_1"]})
        for rid, rids in (("a", ("x",)), ("x", ("a_1",)), ("x", ("y", "y")), ("p", ("x",))):
            with pytest.raises(RequestError, match="in use") as refused:
                client.submit(rid, requests(*rids))
            assert refused.value.param == "rid"
        assert len(pipe.sent) == 2
        mailbox.close()
        client.submit("a", requests("a_0"))

    with_client(check)


def test_closing_aborts_what_has_not_finished_once() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        mailbox = client.submit("a", requests("a_0", "a_1"))
        await pipe.say(delta("a_0", 1, finish=DONE))
        mailbox.close()
        mailbox.close()
        assert [(abort.rid, abort.quiet) for abort in pipe.aborts] == [("a_1", True)]
        assert client.num_pending == 0

    with_client(check)


def test_a_retry_does_not_see_what_its_predecessor_left() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        client.submit("a", requests("a")).close()
        [abort] = pipe.aborts
        retry = client.submit("a", requests("a"))
        reply = ControlReply(ticket=abort.ticket, ok=True, payload={"aborted": 1})
        await pipe.say(delta("a", 1, finish=DONE), reply, delta("a", 2))
        assert [d.token_ids for d in await retry.take()] == [(2,)]

    with_client(check)


def test_an_abort_takes_an_output_a_prompt_or_the_whole_request() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        groups = {"x": ["x_0", "x_1"], "y": ["y_0", "y_1"]}
        client.submit("all", requests("x_0", "x_1", "y_0", "y_1"), groups=groups)
        for rid, expected in (
            ("x_1", ["x_1"]),
            ("y", ["y_0", "y_1"]),
            ("all", ["x_0", "x_1", "y_0", "y_1"]),
            ("nobody", ["nobody"]),
        ):
            pipe.sent.clear()
            counting = asyncio.create_task(client.abort(rid))
            await settle()
            assert [abort.rid for abort in pipe.aborts] == expected
            replies = [
                ControlReply(ticket=abort.ticket, ok=True, payload={"aborted": 1})
                for abort in pipe.aborts
            ]
            await pipe.say(*replies)
            assert await counting == len(expected)

    with_client(check)


def test_prefix_and_everything_are_one_message() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        client.submit("a", requests("a_0", "a_1"))
        pipe.sent.clear()
        tasks = [
            asyncio.create_task(client.abort("a", prefix=True)),
            asyncio.create_task(client.abort(everything=True)),
        ]
        await settle()
        first, second = pipe.aborts
        assert (first.rid, first.prefix, first.everything) == ("a", True, False)
        assert (second.prefix, second.everything) == (False, True)
        for abort, count in ((second, 4), (first, 2)):
            await pipe.say(ControlReply(ticket=abort.ticket, ok=True, payload={"aborted": count}))
        assert [await task for task in tasks] == [2, 4]

    with_client(check)


def test_death_fails_everything_at_once() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        mailbox = client.submit("a", requests("a"))
        call = asyncio.create_task(client.call(partial(Flush, timeout=9.0)))
        await pipe.say(delta("a", 3))
        await pipe.die()
        assert [d.token_ids for d in await mailbox.take()] == [(3,)]  # what had come is not lost
        with pytest.raises(EngineDead, match="gone"):
            await mailbox.take()
        with pytest.raises(EngineDead, match="gone"):
            await call
        with pytest.raises(EngineDead, match="gone"):
            client.submit("b", requests("b"))
        mailbox.close()
        assert client.state is State.DEAD
        assert not client.is_alive
        assert client.num_pending == 0

    with_client(check)


def test_a_defect_while_reading_is_death_too() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        mailbox = client.submit("a", requests("a"))
        await pipe.die(ValueError("nonsense"))
        with pytest.raises(EngineDead, match="nonsense"):
            await mailbox.take()
        assert client.state is State.DEAD

    with_client(check)


def test_silence_counts_as_death_until_the_engine_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.5)

    async def check(client: EngineClient, pipe: Pipe) -> None:
        mailbox = client.submit("a", requests("a"))
        with pytest.raises(EngineDead, match="silent"):
            await asyncio.wait_for(mailbox.take(), 3)
        assert not client.is_alive
        with pytest.raises(EngineDead, match="silent"):
            client.limits()
        beat = Heartbeat(
            num_running=1,
            num_waiting=0,
            num_used_tokens=2,
            num_cached_tokens=3,
            max_total_tokens=4,
            counters={},
        )
        await pipe.say(beat)
        assert client.is_alive
        assert client.load is beat
        assert client.limits().vocab_size == 9

    with_client(check)


def test_nothing_is_taken_before_and_after_it_serves() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        with pytest.raises(EngineDead, match="starting"):
            EngineClient().submit("a", requests("a"))
        assert EngineClient().facts() == {}
        client.stop()
        with pytest.raises(EngineDead, match="stopping"):
            client.submit("a", requests("a"))
        client.abort_all_now()
        assert pipe.aborts == [Abort(everything=True)]

    with_client(check)


def test_any_token_is_a_sign_of_life_and_a_refusal_is_none() -> None:
    async def check(client: EngineClient, pipe: Pipe) -> None:
        output = client.next_output()
        await pipe.say(delta("x", finish=DONE))
        assert not output.done()
        await pipe.say(delta("x", 1))
        assert output.done()
        assert not client.next_output().done()

    with_client(check)
