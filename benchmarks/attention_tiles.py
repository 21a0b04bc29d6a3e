# SPDX-License-Identifier: Apache-2.0
"""Which tiles, spans and numbers of programs are best for paged attention on this GPU?

python benchmarks/attention_tiles.py [--json results.json]
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from attention_cases import GQA, LIMITS, MLA, Step, decode_step
from attention_gpu import prompts
from measure import architecture, in_parallel, machine, read_ceiling, time_graph, write

from compile_only import compile_for
from tetrarch.core.errors import TetrarchError
from tetrarch.kernels.attention import triton as paged
from tetrarch.kernels.attention.tiles import Tile

SHAPES = ((1, 32768), (8, 8192), (64, 1024))
DECODE = (  # rows x keys, warps, stages
    (GQA, 16, "16x64w4s3 16x32w4s4 16x32w2s4"),
    (GQA, 64, "64x64w4s3 16x64w4s3 16x64w4s4 16x32w4s4 16x32w2s4 16x64w2s3"),
    (MLA, 64, "64x64w8s2 64x32w8s3 64x64w4s2"),
)
SPANS = (256, 512)
PROGRAMS = (2, 3, 4)  # for each multiprocessor
PROMPTS = "128x64w8s3 64x64w4s3"


@contextmanager
def tile(choice: Any) -> Iterator[None]:
    """Make every step use this tile."""
    before = paged.span_tile, paged.prompt_tile
    paged.span_tile = paged.prompt_tile = lambda *_, **__: choice
    try:
        yield
    finally:
        paged.span_tile, paged.prompt_tile = before


def tile_of(name: str) -> Any:
    """Return the tile that the name says."""
    return Tile(*map(int, re.findall(r"\d+", name)))


def compile_choice(job: tuple[int, str, int, str, int, int]) -> None:
    """Compile what one choice launches, into Triton's cache, without the GPU."""
    arch, name, page, choice, span, q_len = job
    compile_for(arch)
    layer = GQA if name == GQA.name else MLA
    limits = paged.SplitLimits(**LIMITS, span=span)
    with tile(tile_of(choice)):
        lens = [(q_len, 900)] * 2
        Step(layer, lens, page=page, layers=1, limits=limits, device="meta").run()


def compile_ahead() -> None:
    """Compile all choices."""
    arch = architecture()
    jobs = [
        (arch, layer.name, page, choice, span, 1)
        for layer, page, tiles in DECODE
        for choice in tiles.split()
        for span in SPANS
    ]
    jobs += [(arch, GQA.name, 64, choice, 512, 300) for choice in PROMPTS.split()]
    in_parallel(compile_choice, jobs)


def decode_rows(limits: Any, ceiling: float) -> Iterator[dict[str, Any]]:
    """Try everything, print a line for each choice."""
    for (layer, page, tiles), span in itertools.product(DECODE, SPANS):
        cut = replace(limits, span=span)
        steps = [decode_step(layer, shape, page=page, limits=cut) for shape in SHAPES]
        for name, programs in itertools.product(tiles.split(), PROGRAMS):
            cells: list[str] = []
            try:
                with tile(tile_of(name)):
                    error = steps[0].error() if programs == PROGRAMS[0] else 0.0
                    for step in steps:
                        many = programs * limits.num_programs // 2
                        step.limits = replace(step.limits, num_programs=many)
                        us = time_graph([step.run], seconds=0.02) / step.layers * 1e6
                        size = layer.bytes_per_key * sum(kv for _, kv in step.lens)
                        share = size / us * 1e6 / ceiling
                        cells.append(f"{us:8.1f} {share:4.0%}")
                        yield {
                            "layer": layer.name, "page": page, "span": span, "tile": name,
                            "programs": programs, "streams": len(step.lens), "us": us,
                            "of_ceiling": share,
                        }  # fmt: skip
            except (triton.runtime.errors.OutOfResources, TetrarchError) as problem:
                print(f"{name}: {str(problem).splitlines()[0]}")
                break
            words = f"page {page:3} span {span:4} {name:10} x{programs}"
            print(f"{layer.name:17} {words} {' '.join(cells)}  error {error:.3f}", flush=True)


def prompt_rows(limits: Any) -> Iterator[dict[str, Any]]:
    """Try the tiles of prompts."""
    for name in PROMPTS.split():
        try:
            with tile(tile_of(name)):
                row = prompts(GQA, (1, 8192), page=64, limits=limits)
        except (triton.runtime.errors.OutOfResources, TetrarchError) as problem:
            print(f"{name}: {str(problem).splitlines()[0]}")
            continue
        yield row | {"tile": name}
        print(f"prompt of 8192, page 64, {name:11} {row['tflop_s']:5.0f} TFLOP/s", flush=True)


def main() -> None:
    """Compile, measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    compile_ahead()
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    ceiling = read_ceiling()
    limits = paged.limits_for(torch.device("cuda"), **LIMITS)
    result = {"benchmark": "attention_tiles", **machine(), "read TB/s": ceiling / 1e12}
    result["rows"] = [*decode_rows(limits, ceiling), *prompt_rows(limits)]
    print(f"{time.perf_counter() - began:.0f} s in all")
    write(result, args.json)


if __name__ == "__main__":
    main()
