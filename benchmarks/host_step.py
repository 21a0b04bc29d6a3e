# SPDX-License-Identifier: Apache-2.0
"""What does one step cost the host: scheduling, laying out, launching, reading, telling?

    python benchmarks/host_step.py [--streams 1 64 256] [--overlap]

The model is a stub that returns the same logits at once, so that nothing but the host's own work
is left: the engine schedules, the executor lays the batch out, draws from the logits and reads
the ids, the engine commits and makes deltas, and these are encoded as the door receives them. All
streams decode from prompts of 1,024 tokens. Counted is the process's own CPU time, so that a busy
machine matters less; the table shows medians over blocks of steps, in milliseconds a step, and of
all parts together the least.

The forward itself and copies to a device are left out, and a GPU's launches are more expensive
than a CPU's small operations; benchmarks/serve_gpu.py has those.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch import Tensor

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import demo_model_path, read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.plan import Plan
from tetrarch.config.resolve import resolve
from tetrarch.engine.engine import Engine
from tetrarch.engine.loop import EngineLoop
from tetrarch.engine.messages import encode
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.executor.executor import Executor
from tetrarch.models.build import Forward
from tetrarch.models.describe import describe

PARTS = ("schedule", "launch", "commit", "tell", "encode", "rest")
PROMPT_LEN = 1024
RESULTS = Path(__file__).parent / "results" / "cpu"
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}


class StubModel:
    """Stands where the executor's model does; every forward yields the same logits."""

    def __init__(self, vocab_size: int, most: int) -> None:
        self._logits = torch.randn(most, vocab_size)

    def forward(self, *inputs: Tensor, **_: object) -> Forward:
        """Return logits of as many rows as the last of the inputs lists."""
        return Forward(self._logits[: len(inputs[-1])])


class Inbox:
    """Nothing arrives."""

    def take(self, timeout: float | None) -> list[bytes]:
        """Return no message."""
        del timeout
        return []


def plan_for(streams: int, *, overlap: bool) -> Plan:
    """Return the plan of a server for so many streams."""
    path = demo_model_path()
    args = LaunchArgs(
        model=path,
        quantization="none",
        device="cpu",
        skip_tokenizer_init=True,
        max_running_requests=streams,
        chunked_prefill_size=8192,
        overlap_schedule="on" if overlap else "off",
    )
    return resolve(args, read_checkpoint(path), describe(path), detect("cpu"))


class Clock:
    """CPU time of this process, by part of a step; what a part calls counts for itself."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner, start = self._inner, 0.0, time.process_time()
            result = function(*args, **kwargs)
            spent = time.process_time() - start
            self.spent[part] += spent - self._inner
            self._inner = outer + spent
            return result

        return timed


def engine_for(streams: int, *, overlap: bool) -> Engine:
    """Build the engine that a server would have, around the stub."""
    plan = plan_for(streams, overlap=overlap)
    executor = Executor(plan)
    executor._graphs = StubModel(plan.model.facts.vocab_size, streams)  # type: ignore[assignment]
    return Engine(plan, executor)


def watch(engine: Engine, clock: Clock) -> None:
    """Time the parts of its steps."""
    scheduler, rank = engine._scheduler, engine.rank
    scheduler.schedule = clock.around("schedule", scheduler.schedule)
    scheduler.commit = clock.around("commit", scheduler.commit)
    rank.launch = clock.around("launch", rank.launch)
    engine._land = clock.around("tell", engine._land)


def measure(streams: int, sampling: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of a step, in all and by part."""
    engine = engine_for(streams, overlap=args.overlap)
    clock = Clock()
    watch(engine, clock)
    loop = EngineLoop(engine, Inbox(), clock.around("encode", encode))
    turn = clock.around("rest", loop.turn)
    for row in range(streams):
        prompt = tuple((row * 7 + at) % 1000 for at in range(PROMPT_LEN))
        params = SamplingParams(max_new_tokens=900, ignore_eos=True, **sampling)
        engine.add(GenerateRequest(rid=f"r{row}", prompt_ids=prompt, sampling=params))
    while engine.num_running < streams or engine.counters["generation_tokens_total"] < 2 * streams:
        turn()
    blocks: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.blocks):
        clock.spent.clear()
        for _ in range(args.steps):
            turn()
        for part, seconds in clock.spent.items():
            parts[part].append(seconds / args.steps * 1e3)
        blocks.append(sum(clock.spent.values()) / args.steps * 1e3)
    return {
        "streams": streams,
        "step_ms": round(statistics.median(blocks), 3),
        "step_ms_least": round(min(blocks), 3),
        **{part: round(statistics.median(parts[part]), 3) for part in PARTS},
    }


def main() -> None:
    """Print the table and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=40, help="in one block")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    columns = ("step_ms", "step_ms_least", *PARTS)
    print(f"{'sampling':10}{'streams':>9}" + "".join(f"{column:>15}" for column in columns))
    for name, sampling in SAMPLING.items():
        for streams in args.streams:
            row = {"sampling": name, **measure(streams, sampling, args)}
            rows.append(row)
            numbers = "".join(f"{row[column]:15.3f}" for column in columns)
            print(f"{name:10}{streams:9}{numbers}", flush=True)
    run = provenance()
    result = {"benchmark": "host_step", **run, "overlap": args.overlap, "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"host_step-{run['date']}-{run['commit']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
