# SPDX-License-Identifier: Apache-2.0
"""How fast is an expert layer on a GPU, beside BF16 and beside reading its weights?

    python benchmarks/experts_gpu.py [--shapes qwen3-30b] [--tokens 1 64] [--json FILE]

For M tokens: both GEMMs in W4A16 and in BF16 through the same Triton kernel, `torch._grouped_mm`,
whole layers, and a kernel that only reads the packed weights of the experts that were hit. Times
are medians over replays of CUDA graphs that rotate through routings, so that a layer's weights
come from memory and not from the cache. Every layer is compared with FP32 on the decoded weights
first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from experts_cases import (
    CONTRACTS,
    SHAPES,
    Layer,
    Step,
    decoded,
    meta_step,
    plans_of,
    random_experts,
    spec_of,
    steps_of,
)
from measure import architecture, ceilings, in_parallel, machine, time_graph, write
from torch import Tensor

from compile_only import compile_for
from tetrarch.kernels.grouped_gemm.tiles import block_tokens
from tetrarch.moe.runners.reference import ReferenceRunner
from tetrarch.moe.types import CanonicalExperts, Dispatched, ExpertSpec, PlainExperts, Routing

__all__ = ["over"]

BF16 = torch.bfloat16
TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
CHECKED = 128  # tokens of a forward that are compared
PIECE = 8192  # int32 of codes that a program of the reading kernel takes


@triton.jit
def _read(words, scales, experts, out, SIZE: tl.constexpr, PIECE: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """Read a piece of an expert's codes and the scales that belong to it."""
    expert = tl.load(experts + tl.program_id(1)).to(tl.int64)
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    some = tl.load(words + expert * SIZE + at, mask=at < SIZE, other=0)
    low = tl.program_id(0) * (PIECE // 8) + tl.arange(0, PIECE // 8)
    more = tl.load(scales + expert * (SIZE // 8) + low, mask=low < SIZE // 8, other=0)
    total = tl.xor_sum(some, axis=0) ^ tl.xor_sum(more, axis=0)
    tl.store(out, total, mask=total == 0x5EED)


def read(layer: Layer, name: str, experts: Tensor, out: Tensor) -> None:
    """Read the packed weights of these experts once."""
    words, scales = layer.weights[name].view(torch.int32), layer.weights[f"{name}_block_scale"]
    size = words[0].numel()
    grid = (triton.cdiv(size, PIECE), len(experts))
    _read[grid](words, scales, experts, out, SIZE=size, PIECE=PIECE, num_warps=8)


def over(steps: list[Step], run: Callable[[Step], object]) -> list[Callable[[], object]]:
    """Bind each step."""
    return [lambda step=step: run(step) for step in steps]


def timed(launches: list[Callable[[], object]]) -> float:
    """Return microseconds of one launch."""
    return 1e6 * time_graph(launches)


def check(layer: Layer, step: Step, experts: CanonicalExperts | PlainExperts) -> float:
    """Compare with FP32 on decoded weights, and return the share of equal outputs."""
    few = min(CHECKED, len(step.hidden))
    reference = ReferenceRunner(layer.spec, *plans_of(layer.contract, few), ignored=False)
    scratch = {name: need.empty() for name, need in reference.scratch_specs().items()}
    routing = Routing(step.routing.topk_ids[:few], step.routing.topk_weights[:few])
    arrived = Dispatched(step.hidden[:few], None, routing)
    weights = reference.pack(experts)
    want = reference.run(arrived, weights=weights, scratch=scratch).float()
    got = layer(step)[:few].float()
    error = ((got - want).norm(dim=1) / want.norm(dim=1)).max().item()
    finite = got.isfinite().all().item(), want.isfinite().all().item()
    assert error < 0.02, f"{layer.contract}: {error:.3f} off; finite (got, wanted): {finite}"
    return (got == want).float().mean().item()


def grouped_mm(spec: ExpertSpec, plain: PlainExperts, step: Step) -> Callable[[], object]:
    """Return both GEMMs by torch, on rows that are sorted already and without an activation."""
    ids = step.routing.topk_ids.flatten()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=spec.num_experts)
    ends = counts.cumsum(0).int()
    rows = step.hidden[order // spec.top_k]
    inner = torch.randn(len(rows), spec.intermediate_size, dtype=BF16, device="cuda")
    up, down = plain.gate_up.transpose(1, 2), plain.down.transpose(1, 2)

    def run() -> None:
        torch._grouped_mm(rows, up, offs=ends)
        torch._grouped_mm(inner, down, offs=ends)

    return run


def measure(name: str, tokens: list[int], limits: dict[str, float]) -> list[dict[str, Any]]:
    """Return one row for each M."""
    spec = spec_of(name, "cuda")
    experts = random_experts(spec)
    plain, most = decoded(experts), max(tokens)
    given = {"W4A4": experts, "W4A16": experts, "BF16": plain}
    layers = {c: Layer.of(spec, c, most, weights) for c, weights in given.items()}
    out, rows = torch.empty(1, dtype=torch.int32, device="cuda"), []
    for m in tokens:
        steps = steps_of(spec, m)
        row: dict[str, Any] = {"shape": name, "M": m}
        row["equal"] = {c: check(layer, steps[0], given[c]) for c, layer in layers.items()}
        hit = [step.routing.topk_ids.unique().int() for step in steps]
        floor = [
            lambda n=n, h=h: read(layers["W4A16"], n, h, out) for h in hit for n in spec.matrices
        ]
        row["read floor"] = 2 * timed(floor)
        per_expert = sum(n * k for n, k in spec.matrices.values())
        bytes_read = statistics.mean(len(h) for h in hit) * per_expert * 9 / 16
        flop = 2 * m * spec.top_k * per_expert
        row["roofline"] = max(
            bytes_read / limits["read TB/s"] / 1e6, flop / limits["bf16 TFLOP/s"] / 1e6
        )
        block = block_tokens(m * spec.top_k, spec.num_experts, packed=False)
        unpacked = [Step.of(spec, step.hidden, step.routing, block) for step in steps]
        row["W4A16 GEMMs"] = timed(over(steps, layers["W4A16"].gemms))
        row["BF16 GEMMs"] = timed(over(unpacked, layers["BF16"].gemms))
        row["grouped_mm"] = timed([grouped_mm(spec, plain, step) for step in steps])
        for contract, layer in layers.items():
            row[f"{contract} layer"] = timed(over(steps, layer))
        rows.append(row)
        print_row(row)
    return rows


COLUMNS = ["read floor", "roofline", "W4A16 GEMMs", "BF16 GEMMs", "grouped_mm"]
COLUMNS += [f"{contract} layer" for contract in CONTRACTS]


def print_row(row: dict[str, Any]) -> None:
    """Print the microseconds, the share of the floor, and BF16's time over ours."""
    floor = row["read floor"] if row["M"] <= 256 else row["roofline"]
    mine, peer = row["W4A16 GEMMs"], min(row["BF16 GEMMs"], row["grouped_mm"])
    cells = "".join(f"{row[column]:12.1f}" for column in COLUMNS)
    equal = " ".join(f"{share:.3f}" for share in row["equal"].values())
    print(
        f"{row['shape']:10}{row['M']:6}{cells}{floor / mine:8.0%}{peer / mine:8.2f}  {equal}",
        flush=True,
    )


def compile_layer(job: tuple[int, str, str, int]) -> int:
    """Compile what a layer of M tokens launches, into Triton's cache, without the GPU."""
    arch, name, contract, m = job
    compiled = compile_for(arch)
    step, layer = meta_step(name, m, None), Layer.of(spec_of(name, "meta"), contract, m, None)
    layer(step)
    return len(compiled)


def main() -> None:
    """Compile, check, measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    jobs = itertools.product([architecture()], args.shapes, CONTRACTS, args.tokens)
    count = sum(in_parallel(compile_layer, jobs))
    print(f"{count} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
    limits = ceilings()
    print({name: round(value, 2) for name, value in limits.items()})
    heads = "".join(f"{column:>12}" for column in COLUMNS)
    print(f"us {'':7}{'M':>6}{heads}{'of it':>8}{'x BF16':>8}  equal to FP32, by contract")
    rows = [row for name in args.shapes for row in measure(name, args.tokens, limits)]
    print(f"{time.perf_counter() - start:.0f} s in all")
    write({"benchmark": "experts_gpu", **machine(), "ceilings": limits, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
