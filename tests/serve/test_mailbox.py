# SPDX-License-Identifier: Apache-2.0
"""A mailbox keeps order, fails only when it is empty, and is closed once."""

from __future__ import annotations

import asyncio

import pytest

from tetrarch.core.errors import EngineDead
from tetrarch.engine.request import Delta, FinishReason
from tetrarch.serve.mailbox import Mailbox

DEAD = EngineDead("gone", why="killed", fix="restart")


def test_a_slow_reader_gets_everything_in_order() -> None:
    async def play() -> list[Delta]:
        box = Mailbox(["a"], lambda _: None)
        for token_id in (1, 2, 3):
            box.put(Delta(rid="a", token_ids=(token_id,)))
        return await box.take()

    assert [delta.token_ids for delta in asyncio.run(play())] == [(1,), (2,), (3,)]


def test_what_had_arrived_is_delivered_before_a_failure() -> None:
    async def play() -> None:
        box = Mailbox(["a"], lambda _: None)
        box.put(Delta(rid="a", token_ids=(1,)))
        box.fail(DEAD)
        assert [delta.token_ids for delta in await box.take()] == [(1,)]
        with pytest.raises(EngineDead):
            await box.take()

    asyncio.run(play())


def test_a_waiting_reader_is_woken_by_a_failure() -> None:
    async def play() -> None:
        box = Mailbox(["a"], lambda _: None)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.fail(DEAD)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(reader, 1)

    asyncio.run(play())


def test_closing_releases_once_and_leaves_only_what_is_unfinished() -> None:
    released: list[set[str]] = []
    box = Mailbox(["a", "b"], lambda one: released.append(set(one.open)))
    box.put(Delta(rid="a", finish=FinishReason(kind="length", length=1)))
    box.close()
    box.close()
    assert released == [{"b"}]
