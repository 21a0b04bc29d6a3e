# SPDX-License-Identifier: Apache-2.0
"""A real engine in a real process, with the demo model."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tetrarch.config.plan import Plan
from tetrarch.core.errors import ConfigError, EngineDead
from tetrarch.engine.connection import Connection
from tetrarch.engine.messages import Outbound, Ready, Snapshot
from tetrarch.engine.process import EngineProcess
from tetrarch.engine.request import Delta, GenerateRequest, SamplingParams
from tetrarch.engine.stream import OutputText
from tetrarch.engine.text import Tokenizer
from tetrarch.numerics.contract import SourceFormat


class Bars:
    """A progress display that remembers."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.done: list[int] = []
        self.totals: list[int] = []
        self.num_finished = 0

    def start(self, label: str, total: int, unit: str) -> None:
        self.labels.append(label)
        self.totals.append(total)
        self.done.append(0)

    def advance(self, amount: int = 1) -> None:
        self.done[-1] += amount

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture(scope="module")
def plan(make_plan: Callable[..., Plan], demo_path: Path) -> Plan:
    made = make_plan(demo_path, dtype="bfloat16", source=SourceFormat.BF16)
    # A value that no machine has by accident, for the test that looks for it in the child.
    return replace(made, process_env=(("OMP_NUM_THREADS", "1"), ("KMP_BLOCKTIME", "7")))


@pytest.fixture(scope="module")
def running(plan: Plan) -> Iterator[tuple[EngineProcess, Ready, Bars]]:
    bars = Bars()
    with EngineProcess(plan) as process:
        yield process, process.wait_ready(bars), bars


def hear(connection: Connection, until: Callable[[Outbound], bool]) -> list[Outbound]:
    heard: list[Outbound] = []
    deadline = time.monotonic() + 60
    while not any(until(message) for message in heard):
        assert time.monotonic() < deadline
        heard += connection.receive(timeout=1.0)
    return heard


def ask(connection: Connection, request: GenerateRequest) -> list[Delta]:
    connection.send(request)
    heard = hear(connection, lambda message: isinstance(message, Delta) and bool(message.finish))
    return [message for message in heard if isinstance(message, Delta)]


def test_loading_is_shown_to_its_end(running: tuple[Any, Ready, Bars]) -> None:
    _, ready, bars = running
    assert bars.done == bars.totals
    assert bars.num_finished == len(bars.labels) > 0
    assert ready.payload["limits"]["max_tokens"] == 2048
    assert ready.payload["load_report"]["num_tensors"] > 100
    assert ready.payload["memory"]["weights"] > 10**6


def test_the_plans_environment_reaches_the_child_at_its_spawn_and_nobody_else(
    running: tuple[EngineProcess, Ready, Bars],
) -> None:
    spawned = Path(f"/proc/{running[0].pid}/environ").read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"KMP_BLOCKTIME=7"} <= set(spawned)
    assert f"PATH={os.environ['PATH']}".encode() in spawned  # the rest is the parent's
    assert os.environ.get("KMP_BLOCKTIME") != "7"


def test_a_question_is_answered_across_the_border(
    running: tuple[EngineProcess, Ready, Bars], demo_tokenizer: Tokenizer
) -> None:
    connection = Connection(running[0])
    running[0].inbound.send(b"garbage that must not kill it")
    prompt = tuple(demo_tokenizer.encode_chat([{"role": "user", "content": "What is 12 + 30?"}]))
    request = GenerateRequest(
        rid="q", prompt_ids=prompt, sampling=SamplingParams(temperature=0.0, max_new_tokens=64)
    )
    deltas = ask(connection, request)
    text = OutputText(demo_tokenizer, request.sampling, prompt)
    answer = "".join(text.push(delta.token_ids, delta.finish) for delta in deltas)
    assert "42" in answer
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.matched == next(iter(demo_tokenizer.eos_ids))


def test_an_idle_engine_still_beats(running: tuple[EngineProcess, Ready, Bars]) -> None:
    connection = Connection(running[0])
    connection.send(Snapshot(ticket=1))
    heard = hear(connection, lambda message: type(message).__name__ == "Heartbeat")
    assert running[0].exit_code is None
    assert heard


def test_a_start_that_fails_raises_its_own_error(
    plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    small = replace(plan, memory=replace(plan.memory, max_total_tokens=64))
    with EngineProcess(small) as process:
        with pytest.raises(ConfigError, match="does not hold one context"):
            process.wait_ready()
        folder = Path(process.inbound.last_endpoint.decode().removeprefix("ipc://")).parent
        assert folder.exists()
    assert process.exit_code is not None
    assert not folder.exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_defect_in_a_step_ends_the_process_and_the_wait(plan: Plan) -> None:
    budget = replace(plan.experts.budget, per_rank=4, rows=4)  # less than the scheduler forms
    broken = replace(plan, experts=replace(plan.experts, budget=budget))
    with EngineProcess(broken) as process:
        process.wait_ready()
        connection = Connection(process)
        began = time.monotonic()
        with pytest.raises(EngineDead, match="exit code 1"):
            ask(
                connection,
                GenerateRequest(rid="large", prompt_ids=(5,) * 20, sampling=SamplingParams()),
            )
        assert time.monotonic() - began < 5.0


def freeze(process: EngineProcess) -> None:
    """Stop a process, and wait until it stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_an_engine_that_hears_nothing_is_killed_after_a_while(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process reads nothing; an interrupted wait must end it all the same."""
    monkeypatch.setattr("tetrarch.engine.process._GRACE_S", 0.5)
    process = EngineProcess(plan)
    process.wait_ready()
    freeze(process)
    began = time.monotonic()
    process.close()
    assert 0.5 <= time.monotonic() - began < 2.0
    assert process.exit_code == -signal.SIGKILL


def test_a_wait_for_an_engine_that_is_cut_short_kills_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = EngineProcess(plan)
    process.wait_ready()
    freeze(process)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.close()
    assert time.monotonic() - began < 2.0
    assert not is_alive(process.pid)


def test_an_engine_that_still_loads_is_not_waited_for_and_ignores_the_group(
    plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C reaches the whole group, and the child imports for seconds."""
    process = EngineProcess(plan)
    for _ in range(5):  # at any moment of the imports
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.1)
    assert process.exit_code is None
    began = time.monotonic()
    process.close()
    assert time.monotonic() - began < 1.0
    assert "Traceback" not in capfd.readouterr().err


# `nohup` and some CI runners ignore a hang-up, which children inherit: the script must not.
SCRIPT = """
import pickle, signal, sys, time
from tetrarch.engine.process import EngineProcess
signal.signal(signal.SIGHUP, signal.SIG_DFL)
process = EngineProcess(pickle.load(open(sys.argv[1], "rb")))
process.wait_ready()
print(process.pid, process.inbound.last_endpoint.decode(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_a_script_without_guard_runs_anywhere_and_leaves_no_orphan(
    end: signal.Signals, plan: Plan, tmp_path: Path
) -> None:
    """Files of the working directory hide no module; kill -9 of the parent ends the child.

    A closing terminal or `timeout` signals both: the child lives to remove its folder.
    """
    for name in ("tetrarch", "torch", "select"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    script = tmp_path / "somewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    parent = subprocess.Popen(
        [sys.executable, str(script), "plan"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, endpoint = parent.stdout.readline().split()
    if end is not signal.SIGKILL:
        os.kill(int(pid), end)
    parent.send_signal(end)
    parent.wait()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and is_alive(int(pid)):
        time.sleep(0.02)
    assert not is_alive(int(pid))
    assert not Path(endpoint.removeprefix("ipc://")).parent.exists()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_long_temporary_path_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        EngineProcess(plan)
    assert list(deep.iterdir()) == []
