# SPDX-License-Identifier: Apache-2.0
"""A server whose engine is a script: real sockets and HTTP, no model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from tetrarch.config.cli import read_keywords
from tetrarch.config.generation import read_chat_defaults
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.core.errors import EngineDead
from tetrarch.engine.messages import (
    Abort,
    ControlReply,
    Flush,
    Heartbeat,
    Inbound,
    Outbound,
    Ready,
)
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest, WeightSpan
from tetrarch.engine.stream import OutputText
from tetrarch.engine.text import Tokenizer, load_tokenizer
from tetrarch.engine.validation import Limits
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.app import build_app
from tetrarch.serve.client import EngineClient
from tetrarch.serve.door import Door
from tetrarch.serve.launch import bind
from tetrarch.serve.metrics import Metrics
from tetrarch.serve.reply import time_update

VOCAB = 1024
EOS = 2
ANSWER = "The answer is 42. It is 42!"


def logprob_of(token_id: int) -> float:
    """The script's logprob of every token."""
    return -0.5 - token_id / 1024


class ScriptedEngine:
    """Speaks the engine's messages. Every prompt is answered with `answer`, a token a tick.

    Runs in the server's event loop. `pause` holds all output back. What trainers ask is recorded
    in `actions`, and answered with `reply`; `beat` is what every heartbeat says besides counts.
    """

    def __init__(self, tokenizer: Tokenizer, context_len: int) -> None:
        self.tokenizer, self.context_len = tokenizer, context_len
        self.answer = ANSWER
        self.pause = False
        self.silent = False
        self.refuse_with: FinishReason | None = None
        self.spared: set[str] = set()  # ids that `refuse_with` does not touch
        self.requests: list[GenerateRequest] = []
        self.aborts: list[Abort] = []
        self.actions: list[Any] = []
        self.reply: dict[str, Any] = {"ok": True}
        self.beat: dict[str, Any] = {"weight_version": "v7"}
        self._is_new = True
        self._news: list[Outbound] = []
        self._inbox: list[Inbound] = []
        self._running: dict[str, _Sequence] = {}
        self._dead = False

    @property
    def facts(self) -> dict[str, Any]:
        """What the real engine says when it is ready, as far as the server reads it."""
        limits = Limits(
            vocab_size=VOCAB,
            context_len=self.context_len,
            max_tokens=self.context_len,
            has_text=True,
        )
        return {
            "limits": msgspec.to_builtins(limits),
            "memory": {"weights": 10**9, "kv_cache": 2 * 10**9},
            "startup_available": 8 * 10**9,
            "load_report": {"seconds": 1.5},
        }

    def send(self, message: Inbound) -> None:
        if self._dead:
            raise death()
        self._inbox.append(message)

    def die(self) -> None:
        self._dead = True

    def say(self, **beat: Any) -> None:
        """Change what heartbeats say, and send one."""
        self.beat = {"weight_version": "v7", **beat}
        self._is_new = True

    def tell(self, message: Outbound) -> None:
        """Send what nobody has asked for."""
        self._news.append(message)

    async def receive(self) -> list[Outbound]:
        while True:
            await asyncio.sleep(0.001)
            if self._dead:
                raise death()
            batch, self._news = self._news, []
            for message in self._inbox:
                batch += self._take(message)
            self._inbox.clear()
            if not self.pause:
                batch += self._tick()
            if (batch or self._is_new) and not self.silent:
                self._is_new = False
                return [self._heartbeat(), *batch, self._heartbeat()]

    def _take(self, message: Inbound) -> list[Outbound]:
        if isinstance(message, GenerateRequest):
            self.requests.append(message)
            return self._add(message)
        if isinstance(message, Abort):
            self.aborts.append(message)
            return self._abort(message)
        if isinstance(message, Flush):
            busy = bool(self._running)
            text = "requests are running" if busy else "flushed"
            told = self.reply.get("payload", {})
            return [ControlReply(ticket=message.ticket, ok=not busy, message=text, payload=told)]
        self.actions.append(message)
        return [ControlReply(ticket=message.ticket, **self.reply)]

    def _add(self, request: GenerateRequest) -> list[Outbound]:
        if self.refuse_with is not None and request.rid not in self.spared:
            return [Delta(rid=request.rid, finish=self.refuse_with)]
        self._running[request.rid] = _Sequence(request, self)
        return []

    def _abort(self, abort: Abort) -> list[Outbound]:
        chosen = [
            rid
            for rid in self._running
            if abort.everything or rid == abort.rid or (abort.prefix and rid.startswith(abort.rid))
        ]
        finish = FinishReason(kind="abort", message="aborted by the client")
        deltas: list[Outbound] = [self._running.pop(rid).delta((), finish) for rid in chosen]
        out = [] if abort.quiet else deltas
        if abort.ticket:
            payload = {"aborted": len(chosen)}
            out.append(ControlReply(ticket=abort.ticket, ok=True, payload=payload))
        return out

    def _tick(self) -> list[Outbound]:
        deltas: list[Outbound] = []
        for rid, sequence in list(self._running.items()):
            delta = sequence.advance()
            deltas.append(delta)
            if delta.finish is not None:
                del self._running[rid]
        return deltas

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            num_running=len(self._running),
            num_waiting=0,
            num_used_tokens=16 * len(self._running),
            num_cached_tokens=0,
            max_total_tokens=4096,
            counters={"prompt_tokens_total": 7.0, "cached_tokens_total": 3.0, "steps": 9.0},
            **self.beat,
        )


class _Sequence:
    def __init__(self, request: GenerateRequest, engine: ScriptedEngine) -> None:
        self.request = request
        script = engine.tokenizer.encode(engine.answer)
        self._script = script * 1000 if request.sampling.ignore_eos else [*script, EOS]
        self._text = OutputText(engine.tokenizer, request.sampling, request.prompt_ids)
        self._count = 0

    def advance(self) -> Delta:
        limit = self.request.sampling.max_new_tokens
        if limit == 0:
            return self.delta((), FinishReason(kind="length", length=0))
        token_id = self._script[self._count]
        self._count += 1
        self._text.push((token_id,))
        finish = None
        if token_id == EOS:
            finish = FinishReason(kind="stop", matched=EOS)
        elif self._text.matched is not None:
            finish = FinishReason(kind="stop", matched=self._text.matched)
        elif limit is not None and self._count >= limit:
            finish = FinishReason(kind="length", length=self._count)
        return self.delta((token_id,), finish)

    def delta(self, token_ids: Sequence[int], finish: FinishReason | None) -> Delta:
        request = self.request
        scored: Sequence[int] = ()
        if request.logprob_start >= 0 and self._count <= 1:
            scored = request.prompt_ids[max(request.logprob_start, 1) :]
        return Delta(
            rid=request.rid,
            token_ids=tuple(token_ids),
            logprobs=tuple(map(self._logprob, token_ids)) if request.return_logprobs else (),
            prompt_logprobs=tuple(map(self._logprob, scored)),
            finish=finish,
            num_cached=1,
            versions=(WeightSpan("v7", 0, self._count),) if self._count else (),
            times={"received": 1.0, "scheduled": 1.5, "first_token": 2.0, "finished": 4.0},
        )

    def _logprob(self, token_id: int) -> TokenLogprob:
        near = [token_id, *((token_id + step) % VOCAB for step in range(1, 30))]
        return TokenLogprob(
            token_id,
            logprob_of(token_id),
            top=tuple(
                (each, logprob_of(token_id) - rank)
                for rank, each in enumerate(near[: self.request.top_logprobs])
            ),
            picked=tuple((each, logprob_of(each)) for each in self.request.logprob_ids),
        )


def death() -> EngineDead:
    return EngineDead("the engine process ended", why="exit code -9", fix="restart the server")


class ScriptedServer:
    """A running server and the engine behind it."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self.engine = ScriptedEngine(tokenizer, plan.model.context_len)
        metrics = Metrics(plan.model.served_name)
        self.client = EngineClient(partial(time_update, metrics))
        self.door = Door(
            plan=plan,
            client=self.client,
            tokenizer=tokenizer,
            metrics=metrics,
            chat_defaults=read_chat_defaults(Path(plan.model.path)),
        )
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(build_app(self.door), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def _run(self, listener: Any) -> None:
        self._loop.run_until_complete(self._server.serve(sockets=[listener]))
        if self._task is not None:
            self._task.cancel()
            self._loop.run_until_complete(asyncio.gather(self._task, return_exceptions=True))
        self._loop.close()

    def make_ready(self) -> None:
        ready = Ready(payload=self.engine.facts)
        self.call(lambda: self._start(ready))
        deadline = time.monotonic() + 5
        while not self.client.load.max_total_tokens:  # a heartbeat has come
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _start(self, ready: Ready) -> None:
        self.door.metrics.observe_ready(load_s=ready.payload["load_report"]["seconds"])
        self._task = self._loop.create_task(self.client.run(self.engine, ready))

    def told(self, **beat: Any) -> None:
        """Let the engine say something about itself, and wait until the server knows."""
        self.engine.say(**beat)
        deadline = time.monotonic() + 5
        while any(getattr(self.client.load, name) != value for name, value in beat.items()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def call(self, function: Callable[[], Any]) -> None:
        """Run something in the server's thread, and wait for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(5)

    def close(self) -> None:
        self.http.close()
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(5)


@pytest.fixture(scope="session")
def tokenizer(demo_path: Path) -> Tokenizer:
    return load_tokenizer(str(demo_path))


@pytest.fixture(scope="session")
def plan(demo_facts: ModelFacts) -> Plan:
    """The demo model's plan."""
    reading = read_keywords({"context_length": 256}, environ={})
    return plan_launch(reading, describe=lambda _: demo_facts)


@pytest.fixture
def asked(server: ScriptedServer) -> Iterator[Callable[..., tuple[Any, list[Any]]]]:
    """Return a caller of control endpoints: path and body → response, and what the engine got."""
    engine = server.engine

    def ask(path: str, body: Any = None, *, method: str = "POST", **reply: Any) -> Any:
        engine.reply = {"ok": True, **reply}
        engine.actions.clear()
        return server.http.request(method, path, json=body), engine.actions

    yield ask
    engine.reply = {"ok": True}


@pytest.fixture(scope="module")
def server(plan: Plan, tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Ready, and shared by a file; a test leaves it idle."""
    server = ScriptedServer(plan, tokenizer)
    server.make_ready()
    yield server
    server.close()


@pytest.fixture
def fresh_server(plan: Plan, tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Not ready yet, and the test's own."""
    server = ScriptedServer(plan, tokenizer)
    yield server
    server.close()


@pytest.fixture
def keyed_server(plan: Plan, tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """With both keys."""
    keys = replace(plan.serve, api_key="open", admin_api_key="sesame")
    server = ScriptedServer(replace(plan, serve=keys), tokenizer)
    server.make_ready()
    yield server
    server.close()


@pytest.fixture
def limited_server(plan: Plan, tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Takes bodies of at most 1000 bytes."""
    server = ScriptedServer(
        replace(plan, serve=replace(plan.serve, max_body_bytes=1000)), tokenizer
    )
    server.make_ready()
    yield server
    server.close()


@pytest.fixture
def lenient_server(plan: Plan, tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """With `--allow-auto-truncate`."""
    serve = replace(plan.serve, allow_auto_truncate=True)
    server = ScriptedServer(replace(plan, serve=serve), tokenizer)
    server.make_ready()
    yield server
    server.close()
