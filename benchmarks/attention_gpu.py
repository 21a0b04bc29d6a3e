# SPDX-License-Identifier: Apache-2.0
"""How much of the GPU's memory and arithmetic does paged attention use?

    python benchmarks/attention_gpu.py [--sweep] [--json results.json]

Decode of B sequences of L keys (Qwen3-30B-A3B's heads, 32 queries to 4 of 128; MLA, 128 queries to
one latent of 512 + 64) in microseconds a layer and as a share of the read ceiling, which the same
run measures; prompts in TFLOP/s beside torch's SDPA. Pages lie in random order. Times are replays
of a CUDA graph that walks through several layers, so that a layer's keys are not in the cache.
Every number is checked against FP32 first, and bits where they must be equal. `--sweep` tries
other tiles and spans instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from compile_only import compile_for
from tetrarch.core.errors import TetrarchError
from tetrarch.kernels.attention import triton as paged
from tetrarch.kernels.attention.reference import ScoreRule

GPU = torch.device("cuda")
GRID = [(1, 32768), (8, 8192), (64, 1024), (64, 8192), (256, 1024)]
COLD_BYTES = 400 << 20  # a graph's layers together, eight times the cache of an H200
LIMITS = dict(num_seqs=256, num_units=16384)


@dataclass(frozen=True)
class Layer:
    """The shape of an attention layer."""

    name: str
    heads: int
    groups: int
    dim: int
    value_dim: int
    latent: bool = False

    @property
    def out_dim(self) -> int:
        """Numbers of a head's output."""
        return self.dim if self.latent else self.value_dim

    @property
    def bytes_per_key(self) -> int:
        """What a token keeps, in BF16."""
        return 2 * self.groups * (self.dim + self.value_dim)

    @property
    def flop_per_pair(self) -> int:
        """Operations for one query and one key, all heads."""
        return 2 * self.heads * (self.dim + self.out_dim + self.value_dim * self.latent)


GQA = Layer("GQA 32/4 x 128", 32, 4, 128, 128)
MLA = Layer("MLA 128 x 512+64", 128, 1, 512, 64, latent=True)


class Step:
    """Sequences of one length and several layers' worth of pages."""

    def __init__(
        self, layer: Layer, lens: list[tuple[int, int]], *, page: int, layers: int, limits: Any
    ) -> None:
        torch.manual_seed(0)
        self.layer, self.lens, self.page = layer, lens, page
        counts = [-(-kv_len // page) for _, kv_len in lens]
        order = torch.randperm(sum(counts), device=GPU).int()
        table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=GPU)
        for row, pages in enumerate(order.split(counts)):
            table[row, : len(pages)] = pages
        self.tokens = sum(q_len for q_len, _ in lens)
        ends = torch.tensor([0, *(q_len for q_len, _ in lens)]).cumsum(0).int()
        self.pools = [
            tuple(
                torch.randn(sum(counts), page, layer.groups, dim, device=GPU, dtype=torch.bfloat16)
                for dim in (layer.dim, layer.value_dim)
            )
            for _ in range(layers)
        ]
        self.queries = [
            torch.randn(self.tokens, layer.heads, dim, device=GPU, dtype=torch.bfloat16)
            for dim in (layer.dim, layer.value_dim)
        ]
        self.rule = ScoreRule(scale=(layer.dim + layer.value_dim * layer.latent) ** -0.5)
        self.inputs = dict(
            page_table=table,
            write_at=torch.zeros(self.tokens, dtype=torch.int64, device=GPU),
            cu_seqlens_q=ends.to(GPU),
            kv_lens=torch.tensor([kv for _, kv in lens], dtype=torch.int32, device=GPU),
            page_size=page,
            q_lens=tuple(q_len for q_len, _ in lens),
            kv_lens_host=tuple(kv_len for _, kv_len in lens),
        )
        units = max(1, paged.units_of(self.inputs["q_lens"], self.inputs["kv_lens_host"], limits))
        self.limits = replace(limits, num_units=units)
        specs = paged.scratch_specs(
            self.limits, num_heads=layer.heads, out_dim=layer.out_dim, device=GPU
        )
        self.scratch = {name: spec.empty() for name, spec in specs.items()}

    def run(self) -> Tensor:
        """Attend once in every layer; returns the first layer's output."""
        batch = paged.plan_batch(**self.inputs, limits=self.limits, scratch=self.scratch)
        outputs = []
        for keys, values in self.pools:
            if self.layer.latent:
                out = paged.paged_latent_attention(*self.queries, keys, values, batch, self.rule)
            else:
                out = paged.paged_attention(self.queries[0], keys, values, batch, self.rule)
            outputs.append(out)
        return outputs[0]

    def gather(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return one sequence's queries, keys and values of the first layer in FP32, (H, n, d)."""
        kv_len = self.lens[row][1]
        pages = self.inputs["page_table"][row, : -(-kv_len // self.page)].long()
        keys, values = (
            pool[pages].flatten(0, 1)[:kv_len].float().transpose(0, 1) for pool in self.pools[0]
        )
        begin, end = self.inputs["cu_seqlens_q"][row : row + 2].tolist()
        query = self.queries[0][begin:end]
        if self.layer.latent:
            query = torch.cat([part[begin:end] for part in self.queries], -1)
            keys, values = torch.cat((keys, values), -1), keys
        shared = self.layer.heads // self.layer.groups
        return (
            query.float().transpose(0, 1),
            keys.repeat_interleave(shared, 0),
            values.repeat_interleave(shared, 0),
        )

    def error(self) -> float:
        """Return the largest error of the first and the last sequence, at most 256 rows of each.

        In units of the result's root mean square.
        """
        got = self.run()
        worst = 0.0
        for row in {0, len(self.lens) - 1}:
            query, keys, values = self.gather(row)
            q_len, kv_len = self.lens[row]
            rows = min(q_len, 256)
            scores = query[:, -rows:] @ keys.transpose(1, 2) * self.rule.scale
            at = torch.arange(kv_len - rows, kv_len, device=GPU)[:, None]
            scores.masked_fill_(torch.arange(kv_len, device=GPU) > at, float("-inf"))
            want = (scores.softmax(-1) @ values).transpose(0, 1)
            end = int(self.inputs["cu_seqlens_q"][row + 1])
            difference = (
                got[end - rows : end].float() - want
            ).abs().max() / want.square().mean().sqrt()
            worst = max(worst, difference.item())
        return worst


def time_graph(run: Callable[[], Any], budget_s: float = 0.04) -> float:
    """Return the seconds of one replay of `run`, the median of seven."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times / 1e3

    replay(2)
    times = max(2, math.ceil(budget_s / 7 / replay(2)))
    return statistics.median(replay(times) for _ in range(7))


@triton.jit
def _read(source, out, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803  # pyright: ignore
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    total = tl.sum(tl.load(source + begin + tl.arange(0, BLOCK)))
    tl.store(out + tl.program_id(0), total)


def read_ceiling() -> float:
    """Return the bytes a second of a kernel that only reads 4 GiB."""
    count, block = 1 << 30, 8192
    source = torch.ones(count, dtype=torch.int32, device=GPU)
    out = torch.empty(count // block, dtype=torch.int32, device=GPU)
    seconds = time_graph(lambda: _read[(count // block,)](source, out, BLOCK=block, num_warps=8))
    return count * 4 / seconds


def layers_for(layer: Layer, lens: list[tuple[int, int]]) -> int:
    """Return how many layers exceed the cache."""
    size = layer.bytes_per_key * sum(kv_len for _, kv_len in lens)
    return max(1, min(16, -(-COLD_BYTES // size)))


def decode(
    layer: Layer, shape: tuple[int, int], *, page: int, limits: Any, q_len: int = 1
) -> dict[str, Any]:
    """Time one shape, keys per sequence varying by a few so that tails are ragged."""
    streams, kv_len = shape
    lens = [(q_len, kv_len - row % 7) for row in range(streams)]
    step = Step(layer, lens, page=page, layers=layers_for(layer, lens), limits=limits)
    error = step.error()
    seconds = time_graph(step.run) / len(step.pools)
    size = layer.bytes_per_key * sum(kv for _, kv in lens)
    return {
        "layer": layer.name,
        "streams": streams,
        "keys": kv_len,
        "q_len": q_len,
        "page": page,
        "us": seconds * 1e6,
        "tb_s": size / seconds / 1e12,
        "tflop_s": layer.flop_per_pair * q_len * sum(kv for _, kv in lens) / seconds / 1e12,
        "error": error,
    }  # fmt: skip


def prompts(layer: Layer, shape: tuple[int, int], *, page: int, limits: Any) -> dict[str, Any]:
    """Time whole prompts, and SDPA on the same ones where torch has a fused kernel."""
    count, length = shape
    step = Step(layer, [(length, length)] * count, page=page, layers=1, limits=limits)
    flop = layer.flop_per_pair * count * length * (length + 1) / 2
    row: dict[str, Any] = {
        "layer": layer.name,
        "prompts": count,
        "tokens": length,
        "page": page,
        "in_spans": limits.exact_prompts,
        "error": step.error(),
    }
    row["us"] = time_graph(step.run, 0.15) * 1e6
    row["tflop_s"] = flop / row["us"] / 1e6
    if not layer.latent:
        q, k, v = (
            torch.randn(count, heads, length, layer.dim, device=GPU, dtype=torch.bfloat16)
            for heads in (layer.heads, layer.groups, layer.groups)
        )
        seconds = time_graph(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 0.15
        )
        row["sdpa_tflop_s"] = flop / seconds / 1e12
    return row


def bits(layer: Layer, limits: Any) -> dict[str, bool]:
    """Compare bits: a row alone and among 63 others; a token decoded and in its prompt."""
    generous = replace(limits, num_units=16384, exact_prompts=True)
    lens = [(1, 700 + 137 * row) for row in range(64)]
    batch = Step(layer, lens, page=16, layers=1, limits=generous)
    together = batch.run()

    def alone(row: int, q_len: int, step: Step) -> Tensor:
        end = int(step.inputs["cu_seqlens_q"][row + 1])
        cut = dict(step.inputs)
        cut["page_table"] = step.inputs["page_table"][row : row + 1].contiguous()
        cut["kv_lens"] = step.inputs["kv_lens"][row : row + 1].clone()
        cut["kv_lens_host"], cut["q_lens"] = (step.lens[row][1],), (q_len,)
        cut["cu_seqlens_q"] = torch.tensor([0, q_len], dtype=torch.int32, device=GPU)
        plan = paged.plan_batch(**cut, limits=step.limits, scratch=step.scratch)
        queries = [query[end - q_len : end].contiguous() for query in step.queries]
        if layer.latent:
            return paged.paged_latent_attention(*queries, *step.pools[0], plan, step.rule)
        return paged.paged_attention(queries[0], *step.pools[0], plan, step.rule)

    whole = Step(layer, [(400, 3000)], page=16, layers=1, limits=generous)
    specs = paged.scratch_specs(
        replace(generous, num_units=64), num_heads=layer.heads, out_dim=layer.out_dim, device=GPU
    )
    whole.limits = replace(generous, num_units=64)
    whole.scratch = {name: spec.empty() for name, spec in specs.items()}
    prompt = whole.run()
    return {
        "batch": all(torch.equal(alone(r, 1, batch)[0], together[r]) for r in (0, 13, 40, 63)),
        "chunk": all(torch.equal(alone(0, n, whole), prompt[-n:]) for n in (1, 4, 33, 128)),
    }


@contextmanager
def tile(choice: Any) -> Iterator[None]:
    """Make every step use this tile."""
    before = paged.span_tile, paged.prompt_tile
    paged.span_tile = paged.prompt_tile = lambda *_, **__: choice
    try:
        yield
    finally:
        paged.span_tile, paged.prompt_tile = before


SHAPES = ((1, 32768), (8, 8192), (64, 1024))
TILES = (  # rows x keys, warps, stages
    (GQA, 16, "64x64w4s3 16x64w4s3 16x32w4s4 16x32w2s4"),
    (GQA, 64, "64x64w4s3 16x64w4s3 16x32w4s4 16x32w2s4"),
    (MLA, 64, "64x32w8s3 64x64w8s2"),
)
SPANS = (256, 512)
PROMPT_TILES = "128x64w8s3 64x64w4s3"


def tile_of(name: str) -> Any:
    """Return the tile that the name says."""
    return paged.Tile(*map(int, re.findall(r"\d+", name)))


def compile_choice(job: tuple[str, int, str, int, int]) -> None:
    """Compile what one choice launches, into Triton's cache, without the GPU."""
    global GPU  # of a process of its own

    name, page, choice, span, q_len = job
    GPU = torch.device("meta")
    compile_for(90)
    layer = GQA if name == GQA.name else MLA
    limits = paged.SplitLimits(**LIMITS, span=span)
    with tile(tile_of(choice)):
        Step(layer, [(q_len, 900)] * 2, page=page, layers=1, limits=limits).run()


def compile_ahead() -> None:
    """Compile all choices in as many processes as there are cores."""
    jobs = [
        (layer.name, page, choice, span, 1)
        for layer, page, tiles in TILES
        for choice in tiles.split()
        for span in SPANS
    ]
    jobs += [(GQA.name, 64, choice, 512, 300) for choice in PROMPT_TILES.split()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(compile_choice, jobs))


def sweep(limits: Any, ceiling: float) -> list[dict[str, Any]]:
    """Try tiles, spans and numbers of programs: microseconds of each shape."""
    rows: list[dict[str, Any]] = []
    for (layer, page, tiles), span in itertools.product(TILES, SPANS):
        cut = replace(limits, span=span)
        steps = [
            Step(layer, lens, page=page, layers=layers_for(layer, lens), limits=cut)
            for lens in ([(1, keys - row % 7) for row in range(many)] for many, keys in SHAPES)
        ]
        for name, programs in itertools.product(tiles.split(), (2, 4)):
            cells: list[str] = []
            try:
                with tile(tile_of(name)):
                    error = steps[0].error() if programs == 2 else 0.0
                    for step in steps:
                        many = programs * limits.num_programs // 2
                        step.limits = replace(step.limits, num_programs=many)
                        us = time_graph(step.run, 0.02) / len(step.pools) * 1e6
                        size = layer.bytes_per_key * sum(kv for _, kv in step.lens)
                        share = size / us * 1e6 / ceiling
                        cells.append(f"{us:8.1f} {share:4.0%}")
                        rows.append(
                            {
                                "layer": layer.name, "page": page, "span": span, "tile": name,
                                "programs": programs, "streams": len(step.lens), "us": us,
                                "of_ceiling": share,
                            }
                        )  # fmt: skip
            except (triton.runtime.errors.OutOfResources, TetrarchError) as problem:
                print(f"{name}: {str(problem).splitlines()[0]}")
                break
            words = f"page {page:3} span {span:4} {name:10} x{programs}"
            print(f"{layer.name:17} {words} {' '.join(cells)}  error {error:.3f}", flush=True)
    for name in PROMPT_TILES.split():
        try:
            with tile(tile_of(name)):
                row = prompts(GQA, (1, 8192), page=64, limits=limits)
        except (triton.runtime.errors.OutOfResources, TetrarchError) as problem:
            print(f"{name}: {str(problem).splitlines()[0]}")
            continue
        rows.append(row | {"tile": name})
        print(f"prompt of 8192, page 64, {name:11} {row['tflop_s']:5.0f} TFLOP/s", flush=True)
    return rows


def machine() -> dict[str, Any]:
    """Say where the numbers come from."""
    commit = subprocess.run(
        "git rev-parse --short HEAD", shell=True, capture_output=True, text=True, check=False
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    """Check, measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try other tiles instead")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    limits = paged.limits_for(GPU, **LIMITS)
    result: dict[str, Any] = machine()
    result["bits"] = {layer.name: bits(layer, limits) for layer in (GQA, MLA)}
    print("bits equal:", result["bits"], flush=True)
    ceiling = read_ceiling()
    result["read_ceiling_tb_s"] = ceiling / 1e12
    print(f"read ceiling {ceiling / 1e12:.2f} TB/s, {time.perf_counter() - began:.0f} s")
    if args.sweep:
        compile_ahead()
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        result["sweep"] = sweep(limits, ceiling)
        write(result, args.json)
        print(f"{time.perf_counter() - began:.0f} s in all")
        return
    result["decode"], result["prompts"] = [], []
    for layer, page in ((GQA, 16), (GQA, 64), (MLA, 16), (MLA, 64)):
        for shape in GRID:
            result["decode"].append(decode(layer, shape, page=page, limits=limits))
    verify = replace(limits, short_q_len=4)
    for layer in (GQA, MLA):
        result["decode"].append(decode(layer, (64, 1024), page=64, limits=verify, q_len=4))
    print(f"{'decode':18} page    B     L  new      us   TB/s  of ceiling  TF/s  error")
    for row in result["decode"]:
        row["of_ceiling"] = row["tb_s"] * 1e12 / ceiling
        print(
            f"{row['layer']:18} {row['page']:4} {row['streams']:4} {row['keys']:5} "
            f"{row['q_len']:4} {row['us']:7.1f} {row['tb_s']:6.2f} {row['of_ceiling']:11.0%} "
            f"{row['tflop_s']:5.0f} {row['error']:6.3f}"
        )
    print(f"{'prompts':18} page    B     T in spans      us  TF/s  SDPA  error", flush=True)
    for layer, shapes in ((GQA, [(1, 8192), (8, 2048)]), (MLA, [(1, 4096)])):
        for shape in shapes:
            for page, exact in ((16, False), (64, False), (64, True)):
                cut = replace(limits, exact_prompts=exact)
                row = prompts(layer, shape, page=page, limits=cut)
                result["prompts"].append(row)
                print(
                    f"{layer.name:18} {page:4} {shape[0]:4} {shape[1]:5} {exact!s:>8} "
                    f"{row['us']:7.0f} {row['tflop_s']:5.0f} {row.get('sdpa_tflop_s', 0):5.0f} "
                    f"{row['error']:6.3f}",
                    flush=True,
                )
    worst = max(row["error"] for name in ("decode", "prompts") for row in result[name])
    result["seconds"] = time.perf_counter() - began
    print(f"worst error {worst:.3f} of the root mean square; {result['seconds']:.0f} s")
    write(result, args.json)


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write the result where it was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
