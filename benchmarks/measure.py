# SPDX-License-Identifier: Apache-2.0
"""What every benchmark on a GPU shares: clocks, the card's ceilings, and where numbers come from.

Ratios of one run hold, microseconds of two runs do not compare: take `ceilings` in each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import triton
import triton.language as tl
from provenance import provenance

__all__ = [
    "BEYOND_CACHE",
    "architecture",
    "ceilings",
    "copy_ceiling",
    "in_parallel",
    "machine",
    "product_ceiling",
    "read_ceiling",
    "time_graph",
    "write",
]

Launch = Callable[[], object]
BEYOND_CACHE = 400 << 20  # bytes that a rotation must touch, eight times the cache of an H200


def time_graph(launches: Sequence[Launch], *, seconds: float = 0.05) -> float:
    """Return the seconds of one launch: the median over replays of a CUDA graph of all of them.

    Args:
        launches: What to launch, one after the other. Let them touch `BEYOND_CACHE` bytes together
            where memory is the question.
        seconds: How long to measure, about.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    rounds = max(5, min(200, int(seconds / statistics.median(_samples(graph.replay, 2)))))
    return statistics.median(_samples(graph.replay, rounds)) / len(launches)


def _samples(launch: Launch, times: int) -> list[float]:
    """Return the seconds of each of so many launches, all enqueued before the first is read."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for begin, end in pairs:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


@triton.jit
def _read(source, out, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    total = tl.sum(tl.load(source + begin + tl.arange(0, BLOCK)))
    tl.store(out + tl.program_id(0), total)


def read_ceiling() -> float:
    """Return the bytes a second of a kernel that only reads: 4 GiB, once."""
    count, block = 1 << 30, 8192
    source = torch.ones(count, dtype=torch.int32, device="cuda")
    out = torch.empty(count // block, dtype=torch.int32, device="cuda")
    launch = lambda: _read[(count // block,)](source, out, BLOCK=block, num_warps=8)  # noqa: E731
    return source.nbytes / time_graph([launch])


def copy_ceiling() -> float:
    """Return the bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)  # torch's own `copy_` reaches two thirds of this
    return 2 * source.nbytes / time_graph([lambda: torch.neg(source, out=target)])


def product_ceiling(dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the operations a second of a matrix product of 8192 x 8192 x 8192."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * 8192**3 / time_graph([lambda: a @ b], seconds=0.1)


def ceilings() -> dict[str, float]:
    """Return what this card reaches now: TB/s of reading and copying, TFLOP/s in BF16."""
    return {
        "read TB/s": read_ceiling() / 1e12,
        "copy TB/s": copy_ceiling() / 1e12,
        "bf16 TFLOP/s": product_ceiling() / 1e12,
    }


def architecture() -> int:
    """Return the card's compute capability as a number: 90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def in_parallel(work: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
    """Run jobs in as many processes as there are cores: compiling, into Triton's cache."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        return list(pool.map(work, jobs))


def machine() -> dict[str, Any]:
    """Return command, date, commit, processor, card and versions."""
    return {
        **provenance(),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "platform": platform.platform(),
    }


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write a result where it was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
