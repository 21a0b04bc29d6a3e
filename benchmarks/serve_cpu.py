# SPDX-License-Identifier: Apache-2.0
"""How many tokens a second does a server on this CPU stream, at one client and at sixteen?

The whole path: HTTP, engine process, model. Each stream is a greedy /generate request of the demo
model that ignores its end token. Contracts are measured in turn, round by round, so that a machine
whose speed drifts slows all of them; medians are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from provenance import provenance

CONTRACTS = ("none", "nvfp4_online")
STREAMS = (1, 16)
PROMPT = "<|im_start|>user\nWhat is {number} + 30?<|im_end|>\n<|im_start|>assistant\n"
BARS = {("nvfp4_online", 1): 100, ("nvfp4_online", 16): 800}
FIRST_PORT, START_TIMEOUT_S = 31200, 120


def main() -> None:
    """Start one server a contract, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/serve.json"))
    asked = parser.parse_args()
    seen: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as servers:
        ports = {
            name: servers.enter_context(_server(name, FIRST_PORT + index))
            for index, name in enumerate(CONTRACTS)
        }
        for round_ in range(asked.rounds + 1):
            for name, port in ports.items():
                for streams in STREAMS:
                    rate = asyncio.run(_rate(port, streams, asked.tokens))
                    if round_:  # the first round warms up
                        seen.setdefault((name, streams), []).append(rate)
    rows = [_row(name, streams, rates) for (name, streams), rates in seen.items()]
    for row in rows:
        print(
            f"| {row['quantization']} | {row['streams']} | {row['median']} "
            f"| {row['min']}-{row['max']} | {row['bar'] or ''} |"
        )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(
        json.dumps({**provenance(), "unit": "tokens/s", "rows": rows}, indent=1) + "\n"
    )


def _row(name: str, streams: int, rates: list[float]) -> dict[str, object]:
    return {
        "quantization": name,
        "streams": streams,
        "median": round(statistics.median(rates), 1),
        "min": round(min(rates), 1),
        "max": round(max(rates), 1),
        "rounds": len(rates),
        "bar": BARS.get((name, streams)),
    }


@contextlib.contextmanager
def _server(quantization: str, port: int) -> Iterator[int]:
    command = [sys.executable, "-m", "tetrarch", "serve", "--quantization", quantization]
    command += ["--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_healthy(port)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def _wait_healthy(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"the server on port {port} did not become healthy")


async def _rate(port: int, streams: int, tokens: int) -> float:
    start = time.perf_counter()
    counts = await asyncio.gather(*(_stream(port, index, tokens) for index in range(streams)))
    assert counts == [tokens] * streams, counts
    return sum(counts) / (time.perf_counter() - start)


async def _stream(port: int, index: int, tokens: int) -> int:
    """Read one stream with a bare socket: the client shares the cores it measures."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps(
        {"text": PROMPT.format(number=10 + index), "stream": True, "sampling_params": sampling}
    )
    head = f"POST /generate HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
    last = b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            last = line
    writer.close()
    return json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"]


if __name__ == "__main__":
    main()
