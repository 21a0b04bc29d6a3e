# SPDX-License-Identifier: Apache-2.0
"""One run of a server around an engine that is a puppet; the real one is in tests/e2e/test_stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import zmq

from tetrarch.config.plan import Plan
from tetrarch.core.errors import CheckpointError, EngineDead, TetrarchError
from tetrarch.core.progress import NoProgress
from tetrarch.engine.messages import Ready
from tetrarch.engine.process import EngineProcess
from tetrarch.engine.text import Tokenizer
from tetrarch.serve import life
from tetrarch.serve.client import EngineClient
from tetrarch.serve.door import Door
from tetrarch.serve.launch import bind
from tetrarch.serve.life import Life
from tetrarch.serve.metrics import Metrics


class Puppet:
    """Loads until `loaded` is set; ends when it is closed or killed."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.inbound, self.outbound = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self.inbound.bind("inproc://in")
        self.sentinel, self._ended = os.pipe()
        self.exit_code: int | None = None
        self.loaded = threading.Event()
        self.start_error: TetrarchError | None = None
        self.kill: Callable[[], None] = lambda: self.end(-9)
        self.close: Callable[[], None] = lambda: self.end(0)

    def wait_ready(self, _: object) -> Ready:
        self.loaded.wait()
        if self.exit_code is not None:
            raise EngineDead("the engine process is gone", why="it ended", fix="start again")
        if self.start_error is not None:
            raise self.start_error
        return Ready(payload={"load_report": {"seconds": 1.5}})

    def end(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            os.close(self._ended)
            self.loaded.set()

    def dispose(self) -> None:
        self.end(0)
        os.close(self.sentinel)
        self._context.destroy(linger=0)


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    puppet = Puppet()
    yield puppet
    puppet.dispose()


class Run:
    """A `Life`, and what it told the operator."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, puppet: Puppet) -> None:
        self.said: list[str] = []
        door = Door(
            plan=plan, client=EngineClient(), tokenizer=tokenizer, metrics=Metrics("tetrarch-demo")
        )
        self.client, self.metrics = door.client, door.metrics
        self.life = Life(door, cast("EngineProcess", puppet), NoProgress(), self._say)

    def _say(self, text: str) -> None:
        self.said.append(text)
        signal.raise_signal(signal.SIGTERM)

    async def __call__(self) -> None:
        with bind("127.0.0.1", 0) as listener:
            await asyncio.wait_for(self.life.run(listener), 10)


def serving(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, serve=replace(plan.serve, port=1234, **changes))


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("box", "box")],
)
def test_the_ready_line_names_an_address_to_try(
    host: str, shown: str, plan: Plan, tokenizer: Tokenizer, puppet: Puppet
) -> None:
    puppet.loaded.set()
    run = Run(serving(plan, host=host), tokenizer, puppet)
    asyncio.run(run())
    [line] = run.said
    assert f"on http://{shown}:1234\n" in line
    assert f"curl http://{shown}:1234/v1/chat/completions -H" in line
    assert "Bearer" not in line


def test_the_first_load_is_timed_and_the_start_as_a_whole(
    plan: Plan, tokenizer: Tokenizer, puppet: Puppet
) -> None:
    run = Run(serving(plan), tokenizer, puppet)
    assert run.metrics.startup_s is None
    puppet.loaded.set()
    asyncio.run(run())
    assert run.metrics.startup_s is not None
    assert 0 < run.metrics.startup_s < 10
    text = run.metrics.render(run.client.load).decode()
    assert 'weight_load_duration_seconds_sum{model_name="tetrarch-demo",source="disk"} 1.5' in text


def test_a_key_is_asked_for_and_not_shown(plan: Plan, tokenizer: Tokenizer, puppet: Puppet) -> None:
    puppet.loaded.set()
    run = Run(serving(plan, api_key="sesame"), tokenizer, puppet)
    asyncio.run(run())
    assert "Bearer <key>" in run.said[0]
    assert "sesame" not in run.said[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_engine_loads_is_no_failure(
    number: signal.Signals, plan: Plan, tokenizer: Tokenizer, puppet: Puppet
) -> None:
    run = Run(plan, tokenizer, puppet)

    async def interrupted() -> None:
        asyncio.get_running_loop().call_later(0.3, signal.raise_signal, number)
        await run()

    asyncio.run(interrupted())
    assert run.said == []
    assert run.life.was_interrupted == (number is signal.SIGINT)
    assert puppet.exit_code is not None


def test_what_stopped_the_engines_start_is_raised(
    plan: Plan, tokenizer: Tokenizer, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_ANSWER_S", 0.1)
    puppet.start_error = CheckpointError("a tensor is missing", why="it is", fix="bring it")
    puppet.loaded.set()
    with pytest.raises(CheckpointError, match="a tensor is missing"):
        asyncio.run(Run(plan, tokenizer, puppet)())


def test_signals_are_ours_until_the_engine_is_gone_and_nobody_elses_after(
    plan: Plan, tokenizer: Tokenizer, puppet: Puppet
) -> None:
    """A signal while the engine is closed must not end this process before it."""
    before = signal.getsignal(signal.SIGTERM)

    def close_in_vain() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert killed.wait(5)

    def kill() -> None:
        puppet.end(-9)
        killed.set()

    killed = threading.Event()
    puppet.close, puppet.kill = close_in_vain, kill
    puppet.loaded.set()
    asyncio.run(Run(plan, tokenizer, puppet)())
    assert puppet.exit_code == -9
    assert signal.getsignal(signal.SIGTERM) == before
