# SPDX-License-Identifier: Apache-2.0
"""Both kinds of connection, over sockets whose other end is this test."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
import zmq

from tetrarch.core.errors import EngineDead
from tetrarch.engine.connection import AsyncConnection, Connection
from tetrarch.engine.messages import ControlReply, Snapshot, decode_inbound, encode

REPLY = ControlReply(ticket=1, ok=True)


class FakeProcess:
    """The sockets of an `EngineProcess`, and the child's ends of them."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.inbound, self.child_in = self._pair(zmq.PUSH, zmq.PULL, "inproc://in")
        self.child_out, self.outbound = self._pair(zmq.PUSH, zmq.PULL, "inproc://out")
        self.sentinel, self._ended = os.pipe()
        self.exit_code: int | None = None

    def _pair(self, one: int, other: int, name: str) -> tuple[zmq.Socket[bytes], ...]:
        ends = self._context.socket(one), self._context.socket(other)
        ends[0].bind(name)
        ends[1].connect(name)
        return ends

    def say(self) -> None:
        self.child_out.send(encode([REPLY]))

    def die(self, code: int) -> None:
        self.exit_code = code
        os.close(self._ended)

    def close(self) -> None:
        if self.exit_code is None:
            self.die(0)
        os.close(self.sentinel)
        self._context.destroy(linger=0)


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    fake = FakeProcess()
    yield fake
    fake.close()


def test_messages_go_and_batches_come(process: FakeProcess) -> None:
    connection = Connection(process)
    connection.send(Snapshot(ticket=1))
    assert decode_inbound(process.child_in.recv()) == Snapshot(ticket=1)
    assert connection.receive(timeout=0.0) == []
    process.say()
    assert connection.receive() == [REPLY]


def test_last_words_are_heard_before_the_death(process: FakeProcess) -> None:
    connection = Connection(process)
    process.say()
    process.die(-9)
    assert connection.receive() == [REPLY]
    with pytest.raises(EngineDead, match="killed by signal 9"):
        connection.receive()
    with pytest.raises(EngineDead):
        connection.send(Snapshot(ticket=1))


def test_a_death_ends_the_wait_at_once(process: FakeProcess) -> None:
    async def scenario() -> float:
        deaths: list[EngineDead] = []
        connection = AsyncConnection(process, on_death=deaths.append)
        waiting = asyncio.ensure_future(connection.receive())
        process.say()
        assert await waiting == [REPLY]
        waiting = asyncio.ensure_future(connection.receive())
        await asyncio.sleep(0.01)
        began = time.monotonic()
        process.die(1)
        with pytest.raises(EngineDead, match="exit code 1"):
            await waiting
        assert len(deaths) == 1
        with pytest.raises(EngineDead):
            connection.send(Snapshot(ticket=1))
        return time.monotonic() - began

    assert asyncio.run(scenario()) < 1.0


def test_last_words_are_heard_by_a_loop_too(process: FakeProcess) -> None:
    async def scenario() -> None:
        connection = AsyncConnection(process)
        process.die(0)
        process.say()
        assert await connection.receive() == [REPLY]
        with pytest.raises(EngineDead):
            await connection.receive()

    asyncio.run(scenario())


def test_a_cancelled_wait_loses_no_batch(process: FakeProcess) -> None:
    async def scenario() -> None:
        connection = AsyncConnection(process)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.receive(), 0.01)
        connection.send(Snapshot(ticket=2))
        process.say()
        assert await connection.receive() == [REPLY]
        connection.close()

    asyncio.run(scenario())
    assert decode_inbound(process.child_in.recv()) == Snapshot(ticket=2)
