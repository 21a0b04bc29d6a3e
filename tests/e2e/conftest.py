# SPDX-License-Identifier: Apache-2.0
"""The real thing: `python -m tetrarch serve` with the demo model, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

KEY = "open-sesame"
SMALL = ("--threads", "1", "--max-total-tokens", "8192")
START_S = 90


class RunningServer:
    """A server process, and a client that knows its key."""

    def __init__(self, log: Path, *flags: str, entry: tuple[str, ...] = ("-m", "tetrarch")) -> None:
        self.log = log
        command = [sys.executable, *entry, "serve", "--port", "0", *SMALL, *flags]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            self.url = self._wait_ready()
        except BaseException:
            self.process.kill()
            raise
        self.http = httpx.Client(
            base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}
        )

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"Serving tetrarch-demo on (http://\S+)", self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    @property
    def engine(self) -> psutil.Process:
        """The engine's process: the server's only child."""
        [child] = psutil.Process(self.process.pid).children()
        return child

    def generate(self, **body: Any) -> Any:
        """`POST /generate`, which must succeed."""
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str = "/generate", **body: Any) -> list[Any]:
        """Stream to the end; the events without `[DONE]`, which must be last."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def load(self) -> dict[str, Any]:
        """`GET /v1/loads` of the only rank."""
        return self.http.get("/v1/loads?include=core").json()["loads"][0]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], *, seconds: float) -> float:
        """Return after how many seconds a load report met the condition."""
        began = time.monotonic()
        while not condition(load := self.load()):
            assert time.monotonic() - began < seconds, load
            time.sleep(0.02)
        return time.monotonic() - began

    def stop(self) -> int:
        """Ask the server to end, and return its exit code."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.stop()

    def kill(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        self.http.close()
        if self.process.poll() is None:
            self.engine.kill()
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session", autouse=True)
def calm() -> None:
    """Threads that spin on two cores make torch ten times slower; children inherit this."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Shared by all files; a test leaves it idle and alive."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = RunningServer(log, "--api-key", KEY)
    yield server
    server.end()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    """The test's own, to break."""
    server = RunningServer(tmp_path / "log")
    yield server
    server.end()


@pytest.fixture
def hasty_server(tmp_path: Path) -> Iterator[RunningServer]:
    """The test's own; it lets requests run for half a second once it is told to stop."""
    entry = (
        "import sys; from tetrarch.__main__ import main; from tetrarch.serve import life; "
        "life.GRACE_S = 0.5; sys.exit(main())"
    )
    server = RunningServer(tmp_path / "log", "--log-level", "warning", entry=("-c", entry))
    yield server
    server.kill()
