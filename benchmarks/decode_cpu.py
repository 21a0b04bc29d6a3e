# SPDX-License-Identifier: Apache-2.0
"""How fast does the demo model decode on the CPU, below the engine?

    python benchmarks/decode_cpu.py [--streams 1 16] [--threads 2]

Every stream holds a prompt of 100 tokens and decodes greedily; one step gives each stream one
token. The process runs under the environment that a served engine gets. Contracts are interleaved
block by block, so that a busy machine hurts all alike. `host` is the part of a step outside the
model: laying out the batch, and turning logits into tokens. The table shows medians over steps;
a JSON file with medians and the 10th and 90th percentiles goes to benchmarks/results/cpu/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from provenance import provenance

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import demo_model_path, read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.plan import Plan
from tetrarch.config.resolve import resolve
from tetrarch.core.units import ceil_div
from tetrarch.executor.batch import build_batch
from tetrarch.executor.executor import Executor
from tetrarch.executor.results import Draws
from tetrarch.executor.step import Phase, SampleSpec, SeqChunk, Step
from tetrarch.models.describe import describe

PROMPT = tuple(range(100, 200))
CONTRACTS = ("none", "nvfp4_online")
RESULTS = Path(__file__).parent / "results" / "cpu"


def plan_for(quantization: str, threads: int | None) -> Plan:
    """Return the plan that `tetrarch serve` would make."""
    path = demo_model_path()
    args = LaunchArgs(model=path, quantization=quantization, threads=threads, device="cpu")
    return resolve(args, read_checkpoint(path), describe(path), detect("cpu"))


def step_at(executor: Executor, tokens: list[int], length: int) -> Step:
    """Return the step that computes one token of every stream, after `length` of each."""
    size = executor.capacity.page_size
    room = executor.capacity.num_pages // len(tokens)
    seqs = tuple(
        SeqChunk(
            row=row,
            token_ids=(token,),
            start=length,
            pages=tuple(range(row * room, row * room + ceil_div(length + 1, size))),
            samples=(SampleSpec(temperature=0.0),),
        )
        for row, token in enumerate(tokens)
    )
    return Step(phase=Phase.DECODE, seqs=seqs, rank_tokens=(len(seqs),))


def fill(executor: Executor, streams: int) -> None:
    """Write the prompt of every stream to its pages."""
    for length, token in enumerate(PROMPT):
        executor.step(step_at(executor, [token] * streams, length))


def decode(executor: Executor, streams: int, *, num_steps: int) -> list[float]:
    """Return the seconds of every step after the prompt."""
    tokens, seconds = [PROMPT[-1]] * streams, list[float]()
    for length in range(len(PROMPT), len(PROMPT) + num_steps):
        step = step_at(executor, tokens, length)
        start = time.perf_counter()
        result = executor.step(step)
        seconds.append(time.perf_counter() - start)
        tokens = [seq.token_ids[0] for seq in result.seqs]
    return seconds


def host(executor: Executor, streams: int, *, num_steps: int) -> list[float]:
    """Return the seconds that a step spends outside the model."""
    step, plan = step_at(executor, [5] * streams, len(PROMPT)), executor.plan
    logits = torch.randn(streams, plan.model.facts.vocab_size).to(torch.bfloat16)
    seconds: list[float] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        build_batch(
            step,
            page_size=executor.capacity.page_size,
            budget=plan.experts.budget,
            memory=executor._rows,
        )
        Draws(step, logits).wait()
        seconds.append(time.perf_counter() - start)
    return seconds


def row_of(steps: list[float], outside: list[float], streams: int) -> dict[str, float]:
    """Return one line of the result, in milliseconds and tokens a second."""
    tenths = statistics.quantiles(steps, n=10)
    median = statistics.median(steps)
    return {
        "streams": streams,
        "tokens_per_s": round(streams / median, 1),
        "step_ms": round(median * 1e3, 3),
        "step_ms_p10": round(tenths[0] * 1e3, 3),
        "step_ms_p90": round(tenths[-1] * 1e3, 3),
        "host_ms": round(statistics.median(outside) * 1e3, 3),
    }


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the rows of every contract."""
    executors = {name: Executor(plan_for(name, args.threads)) for name in CONTRACTS}
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with torch.inference_mode():
        for streams in args.streams:
            steps: dict[str, list[float]] = defaultdict(list)
            outside: dict[str, list[float]] = defaultdict(list)
            for executor in executors.values():
                fill(executor, streams)
            for _ in range(args.blocks):
                for name, executor in executors.items():
                    steps[name] += decode(executor, streams, num_steps=args.steps)
                    outside[name] += host(executor, streams, num_steps=args.steps)
            for name in executors:
                rows[name].append(row_of(steps[name], outside[name], streams))
    return rows


def as_served(threads: int | None) -> None:
    """Start again under the environment of an engine process, unless it is this one's."""
    wanted = dict(plan_for("none", threads).process_env)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def show(rows: dict[str, list[dict[str, float]]]) -> None:
    """Print one line per contract and number of streams."""
    columns = ("streams", "tokens_per_s", "step_ms", "step_ms_p10", "step_ms_p90", "host_ms")
    print(f"{'contract':14}" + "".join(f"{column:>14}" for column in columns))
    for name, lines in rows.items():
        for line in lines:
            print(f"{name:14}" + "".join(f"{line[column]:14g}" for column in columns))


def main() -> None:
    """Print the table and keep the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, help="as `tetrarch serve` decides by default")
    parser.add_argument("--steps", type=int, default=50, help="in one block")
    parser.add_argument("--blocks", type=int, default=6)
    args = parser.parse_args()
    as_served(args.threads)
    rows = measure(args)
    show(rows)
    run = provenance()
    result = {
        "benchmark": "decode_cpu",
        **run,
        "threads": torch.get_num_threads(),
        "contracts": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"decode_cpu-{run['date']}-{run['commit']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
