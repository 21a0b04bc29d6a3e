# SPDX-License-Identifier: Apache-2.0
"""How fast does a whole model generate on one GPU, and how near is that to what it must read?

    python benchmarks/serve_gpu.py [--contracts none nvfp4_online] [--streams 1 8 64 256]

Qwen3-30B-A3B's configuration with random weights; prompts of 1,024 random ids, outputs of 256
drawn at temperature 1, all requests at once, through the engine in this process. Per contract and
number of streams: output tokens a second with and without the prompts' share, time to the first
token, time between tokens, and a decode step beside its roofline. That is what a step must read
(attention weights, experts that are hit, head, keys and values) over the read rate that the same
run measures; the experts that a step hits are counted in the routing of the prompts. A profile of
some steps says what the time goes to, and how long the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import machine, read_ceiling, write  # first: it finds the sources
from torch import Tensor

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.resolve import resolve
from tetrarch.engine.engine import Engine
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.executor.executor import Executor
from tetrarch.models.describe import describe
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import Dispatched

HERE = Path(__file__).parent
MODEL = HERE / "configs" / "qwen3_30b_a3b"
PROFILED_STEPS = 8
CONTRACTS = ("none", "nvfp4_online", "nvfp4_online/bf16")
# Part of a kernel's name -> what it belongs to; the first match counts.
KINDS = {
    "attention": ("attend", "add_spans", "list_units", "write_rows"),
    "experts": ("grouped_gemm", "multiply", "align", "finalize", "round_", "sort_slots"),
    "dense": ("gemm", "gemv", "cutlass", "nvjet", "splitK", "cublas"),
}


@dataclass
class Run:
    """What one number of streams showed, in seconds."""

    streams: int
    started: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    decode_steps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def engine_for(contract: str, runner: str, args: argparse.Namespace) -> Engine:
    """Build the engine that `tetrarch serve` would."""
    quantization, _, activations = contract.partition("/")
    launch = LaunchArgs(
        model=str(args.model),
        quantization=quantization,
        moe_activations=activations or "auto",
        moe_runner=runner,
        device=args.device,
        load_format="dummy",
        skip_tokenizer_init=True,
        context_length=args.input + args.output + 64,
        max_running_requests=max(args.streams),
        prefix_cache=False,
        **dict(pair.split("=", 1) for pair in args.set),
    )
    path = str(args.model)
    plan = resolve(launch, read_checkpoint(path, {}), describe(path), detect(args.device))
    return Engine(plan, Executor(plan))


def requests(
    streams: int, args: argparse.Namespace, *, output: int, scored: bool = False
) -> list[GenerateRequest]:
    """Return requests whose prompts share nothing; steps with scored ones are never replayed."""
    draw = torch.Generator().manual_seed(streams * 1000 + output)
    ids = torch.randint(1000, args.vocab, (streams, args.input), generator=draw).tolist()
    return [
        GenerateRequest(
            rid=f"{streams}-{output}-{row}",
            prompt_ids=tuple(prompt),
            return_logprobs=scored,
            logprob_start=0 if scored else -1,
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=output, ignore_eos=True, sampling_seed=row
            ),
        )
        for row, prompt in enumerate(ids)
    ]


def generate(engine: Engine, asked: list[GenerateRequest]) -> Run:
    """Run requests to their end."""
    run = Run(len(asked), started=time.perf_counter())
    for request in asked:
        engine.add(request)
    before = run.started
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter()
        if len(run.first) == run.streams and engine.num_running == run.streams:
            run.decode_steps.append(now - before)
        before = now
        for delta in deltas:
            run.tokens += len(delta.token_ids)
            if delta.rid in run.first and delta.token_ids:
                run.gaps.append((now - run.last[delta.rid]) / len(delta.token_ids))
            run.first.setdefault(delta.rid, now)
            run.last[delta.rid] = now
    run.seconds = time.perf_counter() - run.started
    return run


def row_of(run: Run) -> dict[str, float]:
    """Return one line of the result."""
    waits = [at - run.started for at in run.first.values()]
    gaps = sorted(run.gaps)
    return {
        "streams": run.streams,
        "output_tokens_per_s": round(run.tokens / run.seconds, 1),
        "ttft_ms_median": round(statistics.median(waits) * 1e3, 2),
        "ttft_ms_max": round(max(waits) * 1e3, 2),
        "itl_ms_median": round(statistics.median(gaps) * 1e3, 3),
        "itl_ms_p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 3),
        "step_ms": round(statistics.median(run.decode_steps) * 1e3, 3),
    }


def profile(engine: Engine, asked: list[GenerateRequest]) -> dict[str, float]:
    """Return milliseconds of a decode step by kind of kernel, and the wall's."""
    for request in asked:
        engine.add(request)
    started: set[str] = set()
    while len(started) < len(asked):
        started |= {delta.rid for delta in engine.step()}
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    spent: dict[str, float] = defaultdict(float)
    launches = 0
    for event in seen.key_averages():
        kind = next(
            (k for k, names in KINDS.items() if any(n in event.key for n in names)), "other"
        )
        spent[kind] += event.self_device_time_total / 1e3 / PROFILED_STEPS
        launches += event.count
    busy = sum(spent.values())
    by_kind = {f"{kind}_ms": round(ms, 3) for kind, ms in sorted(spent.items())}
    waits = max(0.0, 1 - busy / (wall * 1e3 / PROFILED_STEPS))
    return {**by_kind, "kernels": launches // PROFILED_STEPS, "gpu_waits_share": round(waits, 4)}


@contextmanager
def routing_seen(layers: list[MoELayer]) -> Iterator[list[Tensor]]:
    """Collect the experts that each call of an expert layer chooses."""
    seen: list[Tensor] = []
    for layer in layers:
        run = layer.runner.run

        def recorded(x: Dispatched, *, run: Any = run, **rest: Any) -> Tensor:
            seen.append(x.routing.topk_ids.clone())
            return run(x, **rest)

        layer.runner.run = recorded  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        for layer in layers:
            del layer.runner.run


def bytes_of_step(engine: Engine, streams: int, args: argparse.Namespace) -> dict[str, float]:
    """Return what a decode step of so many streams must read, in bytes."""
    model = engine.rank._model  # a benchmark may look inside
    layers = list(model.experts.values())
    with routing_seen(layers) as seen:
        generate(engine, requests(max(1, min(streams, 8)), args, output=1, scored=True))
    chosen = [ids for ids in seen if len(ids) >= streams]
    draw = torch.Generator().manual_seed(0)
    hit = [
        len(ids[torch.randperm(len(ids), generator=draw)[:streams].to(ids.device)].unique())
        for ids in chosen
    ]
    experts = sum(layer.weights.num_bytes / layer.spec.num_local_experts for layer in layers)
    table, head = model.hf.get_input_embeddings().weight, model.hf.get_output_embeddings().weight
    looked_up = 0 if head is table else table.nbytes  # a few rows of it are read
    per_token = sum(
        site.num_kv_heads * (site.key_dim + site.value_dim) * model.dtype.itemsize
        for site in model.sites
    )
    length = args.input + args.output // 2
    return {
        "experts_hit": round(statistics.mean(hit), 1),
        "expert_bytes": statistics.mean(hit) * experts,
        "dense_bytes": float(model.weights.num_bytes - looked_up),
        "kv_bytes": float(per_token * length * streams),
    }


def measure(engine: Engine, args: argparse.Namespace, rate: float) -> list[dict[str, float]]:
    """Return a line for each number of streams."""
    rows: list[dict[str, float]] = []
    generate(engine, requests(max(args.streams), args, output=4))
    for streams in args.streams:
        row = row_of(generate(engine, requests(streams, args, output=args.output)))
        prompts = generate(engine, requests(max(streams, 16), args, output=1))
        row["prefill_tokens_per_s"] = round(prompts.streams * args.input / prompts.seconds)
        needs = bytes_of_step(engine, streams, args)
        floor = sum(v for k, v in needs.items() if k.endswith("_bytes")) / rate
        row |= {"experts_hit": needs["experts_hit"], "floor_ms": round(floor * 1e3, 3)}
        row["roofline_share"] = round(floor * 1e3 / row["step_ms"], 3)
        if args.device == "cuda":
            row |= profile(engine, requests(streams, args, output=PROFILED_STEPS + 8))
        print(row, flush=True)
        rows.append(row)
    return rows


def memory(engine: Engine) -> dict[str, float]:
    """Return GiB by region, and what the device has left."""
    held = {name: round(size / 2**30, 3) for name, size in engine.rank.memory.items()}  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        held["device_used"] = round((total - free) / 2**30, 3)
    return held


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runner", default="triton")
    parser.add_argument("--contracts", nargs="+", default=CONTRACTS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--set", nargs="*", default=[], help="further settings, name=value")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rate = read_ceiling() if args.device == "cuda" else 2e10
    result: dict[str, Any] = {
        "benchmark": "serve_gpu",
        **(machine() if args.device == "cuda" else {}),
        "read TB/s": rate / 1e12,
    }
    for contract in args.contracts:
        start = time.perf_counter()
        engine = engine_for(contract, args.runner, args)
        started = round(time.perf_counter() - start, 2)
        print(contract, f"ready in {started} s", memory(engine), flush=True)
        rows = measure(engine, args, rate)
        result[contract] = {"ready_s": started, "memory_gib": memory(engine), "rows": rows}
        write(result, args.json)
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
