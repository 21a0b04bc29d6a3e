# SPDX-License-Identifier: Apache-2.0
"""The real thing: `python -m tetrarch serve` with the demo model, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
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
import torch
from safetensors.torch import load_file, save_file

KEY = "open-sesame"
SMALL = ("--threads", "1", "--max-total-tokens")
START_S = 300.0  # 8 s on a quiet machine; a start that fails is noticed at once


class RunningServer:
    """A server process, and a client that knows its key."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        entry: tuple[str, ...] = ("-m", "tetrarch"),
        num_tokens: int = 8192,
    ) -> None:
        self.log = log
        small = (*SMALL, str(num_tokens))
        command = [sys.executable, *entry, "serve", "--port", "0", *small, *flags]
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


@pytest.fixture(scope="session")
def drafting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It speculates; a test leaves it idle and alive."""
    log = tmp_path_factory.mktemp("drafting") / "log"
    server = RunningServer(log, "--speculative-algorithm", "NEXTN")
    yield server
    server.end()


@pytest.fixture
def cramped_server(tmp_path: Path) -> Iterator[RunningServer]:
    """The test's own; it speculates, deterministically in FP32, and has pages for 256 tokens."""
    flags = ("--speculative-algorithm", "NEXTN", "--context-length", "160")
    exact = ("--deterministic", "--dtype", "float32")
    server = RunningServer(tmp_path / "log", *flags, *exact, num_tokens=256)
    yield server
    server.kill()


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


class TrainedServer(RunningServer):
    """A server whose weights a trainer replaces. Between tests it serves the demo model."""

    def ask(self, path: str, *, status: int = 200, method: str = "POST", **body: Any) -> Any:
        """Call a control endpoint, which must answer `status`."""
        reply = self.http.request(method, path, json=body)
        assert reply.status_code == status, f"{path}: {reply.text}"
        return reply.json()

    def load_from(self, path: Path | str, **more: Any) -> Any:
        """`POST /update_weights_from_disk`, which must succeed."""
        reply = self.ask("/update_weights_from_disk", model_path=str(path), **more)
        assert reply["success"] is True
        return reply

    def checksums(self) -> dict[str, str]:
        """Return the digest of every weight."""
        return self.ask("/weights_checker", action="checksum")["checksums"]

    def bits(self) -> tuple[list[int], list[float]]:
        """Generate greedily; return the ids and their logprobs."""
        prompt = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        reply = self.generate(text=prompt, sampling_params=sampling, return_logprob=True)
        scores = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        return reply["output_ids"], scores

    def reason(self) -> str:
        """Return the code with which a request is refused now."""
        reply = self.http.post("/generate", json={"text": "1"})
        assert reply.status_code == 503, reply.text
        assert reply.headers["retry-after"]
        return reply.json()["error"]["type"]


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedServer]:
    server = TrainedServer(tmp_path_factory.mktemp("trained") / "log")
    yield server
    server.end()


@pytest.fixture
def trained(_trained: TrainedServer, demo_path: Path) -> Iterator[TrainedServer]:
    """A server to train. Whatever a test leaves behind, a full update must repair."""
    server = _trained
    before = server.bits()
    yield server
    server.http.post("/end_weight_update")  # 400 where none is open
    server.ask("/resume_memory_occupation")
    server.load_from(demo_path)
    server.ask("/continue_generation")
    server.wait_for(lambda load: load["num_total_reqs"] == 0, seconds=10)
    assert server.bits() == before
    assert server.http.get("/health_generate").status_code == 200


@pytest.fixture(scope="session")
def other_path(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same shape as the demo model, every weight a little different."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(demo_path, folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(7)
    tensors = load_file(file)
    for tensor in tensors.values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.mul_(1 + 0.05 * noise.to(tensor.dtype))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
