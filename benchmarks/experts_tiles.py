# SPDX-License-Identifier: Apache-2.0
"""Which tiles are best for the grouped GEMM on packed weights on this GPU?

    python benchmarks/experts_tiles.py [--shapes qwen3-30b] [--tokens 1 64] [--json FILE]

Each GEMM on its own, in W4A16, times as in experts_gpu.py.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from experts_cases import SHAPES, Layer, meta_step, random_experts, spec_of, steps_of
from experts_gpu import TOKENS, over
from measure import architecture, ceilings, in_parallel, machine, time_graph, write

from compile_only import compile_for
from tetrarch.kernels.grouped_gemm.tiles import Tile
from tetrarch.moe.types import ExpertSpec


def candidates(tokens: int) -> list[Tile]:
    """Return the tiles that a sweep tries for blocks of so many tokens."""
    tiles = {
        16: [(64, 4, w, s) for w, s in ((4, 2), (4, 3), (4, 4))]
        + [(64, 2, 4, 4), (64, 2, 4, 6), (128, 2, 4, 4), (128, 4, 8, 3), (128, 2, 8, 4)],
        32: [(64, 2, 4, 3), (64, 2, 4, 5), (64, 4, 4, 3), (128, 2, 8, 4), (128, 2, 4, 4)],
        64: [
            (64, 1, 4, 4),
            (64, 2, 4, 3),
            (128, 1, 4, 4),
            (128, 1, 8, 4),
            (128, 2, 8, 3),
            (128, 1, 8, 3),
            (128, 2, 8, 2),
            (128, 1, 8, 6),
        ],
        128: [
            (128, 1, 8, 3),
            (128, 1, 8, 4),
            (128, 1, 8, 5),
            (128, 2, 8, 2),
            (128, 2, 8, 3),
            (64, 1, 4, 3),
            (64, 1, 4, 4),
            (64, 2, 4, 2),
            (64, 2, 4, 3),
        ],
        256: [(128, 1, 8, 3), (128, 1, 8, 4), (64, 1, 4, 3), (64, 2, 4, 2)],
    }
    return [Tile(rows, tokens, q, w, s, ptx=True) for rows, q, w, s in tiles[tokens]]


def fitting(spec: ExpertSpec, name: str, tokens: int) -> list[Tile]:
    """Return the candidates whose steps divide the GEMM's K."""
    return [t for t in candidates(tokens) if not spec.matrices[name][1] // 64 % t.k_blocks]


def blocks_for(spec: ExpertSpec, tokens: int) -> list[int]:
    """Return block sizes about as large as an expert's rows."""
    average = tokens * spec.top_k / spec.num_experts
    sizes = (16, 32, 64, 128, 256)
    return [
        size
        for size in sizes
        if (size <= 4 * average or size == sizes[0]) and (8 * size >= average or size == sizes[-1])
    ]


def sweep(name: str, tokens: list[int]) -> list[dict[str, Any]]:
    """Return the time of every tile of both GEMMs, the three best printed."""
    spec = spec_of(name, "cuda")
    layer = Layer.of(spec, "W4A16", max(tokens), random_experts(spec))
    rows: list[dict[str, Any]] = []
    for m in tokens:
        found: dict[str, list[tuple[float, Tile]]] = {"gate_up": [], "down": []}
        layer.gemms(steps_of(spec, m)[0])  # numbers for the second GEMM alone
        for block in blocks_for(spec, m):
            steps = steps_of(spec, m, block=block)
            for gemm, times in found.items():
                for tile in fitting(spec, gemm, block):
                    launch = over(steps, lambda step, t=tile, g=gemm: layer.gemm(g, step, t))
                    try:
                        times.append((1e6 * time_graph(launch, seconds=0.01), tile))
                    except triton.runtime.errors.OutOfResources as error:
                        print(name, m, gemm, tile, error)
        for gemm, times in found.items():
            best = sorted(times, key=lambda pair: pair[0])
            rows += [{"shape": name, "M": m, "gemm": gemm, "us": t, **asdict(x)} for t, x in best]
            print(f"{name:10}{m:6} {gemm}", flush=True)
            for us, tile in best[:4]:
                print(f"    {us:9.1f}  {tile}")
    return rows


def compile_tile(job: tuple[int, str, str, int, Tile]) -> int:
    """Compile one candidate of a sweep."""
    arch, name, gemm, m, tile = job
    compiled = compile_for(arch)
    layer = Layer.of(spec_of(name, "meta"), "W4A16", m, None)
    layer.gemm(gemm, meta_step(name, m, tile.tokens), tile)
    return len(compiled)


def main() -> None:
    """Compile, measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    arch = architecture()
    jobs = {
        (name, gemm, tile): (arch, name, gemm, m, tile)
        for name, m, gemm in itertools.product(args.shapes, args.tokens, ("gate_up", "down"))
        for block in blocks_for(spec_of(name, "meta"), m)
        for tile in fitting(spec_of(name, "meta"), gemm, block)
    }
    count = sum(in_parallel(compile_tile, jobs.values()))
    print(f"{count} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
    limits = ceilings()
    print({name: round(value, 2) for name, value in limits.items()})
    rows = [row for name in args.shapes for row in sweep(name, args.tokens)]
    print(f"{time.perf_counter() - start:.0f} s in all")
    write({"benchmark": "experts_tiles", **machine(), "ceilings": limits, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
