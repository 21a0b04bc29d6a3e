# SPDX-License-Identifier: Apache-2.0
"""The server's side of the engine: requests in, deltas out, and one answer to "is it alive".

Nothing here waits for an engine that is gone. Every HTTP request owns a `Mailbox`; when the
engine dies, every mailbox and every control call fails at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from tetrarch.core.errors import EngineDead, RequestError
from tetrarch.core.log import get_logger
from tetrarch.engine.messages import Abort, ControlReply, Heartbeat, Inbound, Outbound, Ready
from tetrarch.engine.request import Delta, GenerateRequest
from tetrarch.engine.validation import Limits
from tetrarch.serve.mailbox import Mailbox

__all__ = ["EngineClient", "Link", "State"]

_log = get_logger(__name__)

STALE_S = 20.0
"""Without a heartbeat for so long the engine counts as dead until it speaks again."""

_NONE: Mapping[str, Sequence[str]] = {}
_NO_LOAD = Heartbeat(
    num_running=0,
    num_waiting=0,
    num_used_tokens=0,
    num_cached_tokens=0,
    max_total_tokens=0,
    counters={},
)


class Link(Protocol):
    """The pipe to the engine process (`engine.connection.AsyncConnection`)."""

    def send(self, message: Inbound) -> None:
        """Send without waiting; `EngineDead` when the process is gone."""
        ...

    async def receive(self) -> list[Outbound]:
        """Wait for the next batch; `EngineDead` when the process is gone."""
        ...


class State(StrEnum):
    """Where the engine is in its life, as the server knows it."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


class EngineClient:
    """Talks to one engine process from one event loop; `unasked` takes replies to no call."""

    def __init__(self, unasked: Callable[[ControlReply], object] = lambda _: None) -> None:
        self._unasked = unasked
        self._link: Link | None = None
        self._mailboxes: dict[str, Mailbox] = {}  # engine rid -> mailbox
        self._groups: dict[str, Sequence[str]] = {}  # rid of a request or prompt -> its outputs
        self._leaving: dict[int, str] = {}  # ticket of a quiet abort -> engine rid
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._num_calls = 0
        self._last_sign = 0.0
        self._next_output: asyncio.Future[None] | None = None
        self._failure: EngineDead | None = None
        self.state = State.STARTING
        self.ready: Ready | None = None
        self.load = _NO_LOAD

    async def run(self, link: Link, ready: Ready) -> None:
        """Deliver what the engine sends, until it dies or the server ends."""
        self._link, self.ready = link, ready
        if self.state is State.STARTING:
            self.state = State.READY
        self._last_sign = time.monotonic()
        watch = asyncio.create_task(self._watch_silence())
        try:
            while True:
                batch = await link.receive()
                self._last_sign = time.monotonic()
                for message in batch:
                    self._deliver(message)
        except EngineDead as error:
            self.die(error)
        except Exception as error:  # a defect of ours; without this, clients would hang
            _log.error("reading what the engine says failed", exc_info=error)
            why = f"reading what it says failed: {error!r}"
            self.die(EngineDead("the server has lost its engine", why=why, fix="restart it"))
            raise
        finally:
            watch.cancel()

    def _deliver(self, message: Outbound) -> None:
        if isinstance(message, Delta):
            self._deliver_delta(message)
        elif isinstance(message, Heartbeat):
            self.load = max(message, self.load, key=attrgetter("at"))
        elif isinstance(message, ControlReply):
            self._leaving.pop(message.ticket, None)
            call = self._calls.pop(message.ticket, None)
            if not message.ticket:
                self._unasked(message)
            if call is not None and not call.done():
                call.set_result(message)

    def _deliver_delta(self, delta: Delta) -> None:
        if delta.token_ids and self._next_output is not None:
            self._next_output.set_result(None)
            self._next_output = None
        # A request that we aborted a moment ago has no mailbox any more, or already the one of a
        # retry under the same id, which must not see what its predecessor left.
        mailbox = self._mailboxes.get(delta.rid)
        if mailbox is not None and delta.rid not in self._leaving.values():
            mailbox.put(delta)
            if delta.finish is not None:
                del self._mailboxes[delta.rid]

    def next_output(self) -> asyncio.Future[None]:
        """Return what is done once the engine has produced a token, for anybody."""
        if self._next_output is None:
            self._next_output = asyncio.get_running_loop().create_future()
        return self._next_output

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.state is State.READY and not self.is_alive:
                self._fail_pending(_silent())

    def die(self, error: EngineDead) -> None:
        """Fail everything that waits, now, and everything that will be asked."""
        self.state, self._failure = State.DEAD, error
        self._fail_pending(error)
        self._mailboxes.clear()

    def _fail_pending(self, error: EngineDead) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._calls.clear()

    @property
    def is_alive(self) -> bool:
        """The engine is ready and has spoken lately."""
        return self.state is State.READY and time.monotonic() - self._last_sign < STALE_S

    @property
    def num_pending(self) -> int:
        """Outputs the server waits for; the engine's own counts follow a message later."""
        return len(self._mailboxes)

    def _live_link(self) -> Link:
        if self._failure is not None:
            raise self._failure
        if self._link is None or self.state is not State.READY:
            raise EngineDead(
                f"the engine is {self.state.value}",
                why="it takes requests from when its weights are loaded until it is told to stop",
                fix="retry when GET /health answers 200",
            )
        if not self.is_alive:
            raise _silent()
        return self._link

    def check_alive(self) -> None:
        """Raise `EngineDead` unless a request would be taken now."""
        self._live_link()

    def submit(
        self,
        rid: str,
        requests: Sequence[GenerateRequest],
        *,
        groups: Mapping[str, Sequence[str]] = _NONE,
    ) -> Mailbox:
        """Send the requests of one HTTP request to the engine.

        Args:
            rid: Id of the HTTP request; `abort` takes it for all of its outputs.
            requests: One an output.
            groups: Further ids that `abort` takes, and the ids of the outputs they stand for.

        Raises:
            EngineDead: There is no engine to send to.
            RequestError: An id is in use.
        """
        link = self._live_link()
        rids = [request.rid for request in requests]
        groups = {**groups, rid: rids}
        names = (*groups, *rids)
        taken = [name for name in names if name in self._mailboxes or name in self._groups]
        if taken or len(set(rids)) < len(rids):
            raise RequestError(
                f"rid {(taken or rids)[0]!r} is in use",
                why="the ids of live requests are unique, so that an abort is exact",
                fix="choose another rid, or leave it out",
                param="rid",
            )
        mailbox = Mailbox(rids, lambda box: self._release(tuple(groups), box))
        self._groups.update(groups)
        for request in requests:
            self._mailboxes[request.rid] = mailbox
            link.send(request)
        return mailbox

    def _release(self, groups: Sequence[str], mailbox: Mailbox) -> None:
        for name in groups:
            del self._groups[name]
        for rid in mailbox.open:
            if self._mailboxes.pop(rid, None) is not None and self._link is not None:
                with suppress(EngineDead):  # then there is nothing left to free
                    self._leave(self._link, rid)
        mailbox.open.clear()

    def _leave(self, link: Link, rid: str) -> None:
        """Abort an output whose client has gone; its id is clean once the engine has replied."""
        self._num_calls += 1
        link.send(Abort(ticket=self._num_calls, rid=rid, quiet=True))
        self._leaving[self._num_calls] = rid

    async def abort(self, rid: str = "", *, prefix: bool = False, everything: bool = False) -> int:
        """End outputs, whose clients then get what there is; return how many.

        Args:
            rid: Of an HTTP request or of one of its outputs; an unknown one is no error.
            prefix: Take every id that starts with `rid`.
            everything: Take all.

        Raises:
            EngineDead: There is no engine.
        """
        rids = [rid] if prefix or everything else self._groups.get(rid, [rid])
        messages = [partial(Abort, rid=name, prefix=prefix, everything=everything) for name in rids]
        replies = await asyncio.gather(*(self.call(message) for message in messages))
        return sum(int(reply.payload["aborted"]) for reply in replies)

    async def call(self, make: Callable[..., Inbound]) -> ControlReply:
        """Send a control message and await its reply.

        Args:
            make: Builds the message, given its `ticket`.

        Raises:
            EngineDead: There is no engine, or it died before it answered.
        """
        link = self._live_link()
        self._num_calls += 1
        reply: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = reply
        link.send(make(ticket=self._num_calls))
        return await reply

    def stop(self) -> None:
        """Take nothing new; what runs goes on."""
        if self.state is not State.DEAD:
            self.state = State.STOPPING

    def abort_all_now(self) -> None:
        """End everything that runs, also while stopping; the clients get what there is."""
        if self._link is not None:
            with suppress(EngineDead):  # then there is nothing left to end
                self._link.send(Abort(everything=True))

    def limits(self) -> Limits:
        """What bounds a request.

        Raises:
            EngineDead: There is no engine.
        """
        self._live_link()
        return msgspec.convert(self.facts()["limits"], Limits)

    def facts(self) -> dict[str, Any]:
        """What the engine said when it was ready; empty before."""
        return {} if self.ready is None else self.ready.payload


def _silent() -> EngineDead:
    return EngineDead(
        f"the engine has been silent for {STALE_S:.0f} seconds",
        why="its process exists but sends no heartbeat",
        fix="look at its log; restart the server if it stays silent",
    )
