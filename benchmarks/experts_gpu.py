# SPDX-License-Identifier: Apache-2.0
"""How fast is an expert layer on a GPU, beside BF16 and beside reading its weights?

    python benchmarks/experts_gpu.py [--shapes qwen3-30b] [--tokens 1 64] [--sweep] [--json FILE]

Random weights and uniform routing in the shapes of served models. For M tokens: both GEMMs in
W4A16 and in BF16 through the same Triton kernel, `torch._grouped_mm`, whole layers, and a kernel
that only reads the packed weights of the experts that were hit. Times are medians over replays of
CUDA graphs that rotate through routings, so that a layer's weights come from memory and not from
the cache. Every layer is compared with FP32 on the decoded weights first. `--sweep` tries other
tiles instead, each GEMM on its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_only import compile_for
from tetrarch.config.plan import ExpertPlan, QuantPlan, TokenBudget
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.kernels.grouped_gemm.tiles import Tile, block_tokens, max_blocks, tile_for
from tetrarch.kernels.grouped_gemm.triton import Epilogue, Weight, grouped_gemm
from tetrarch.kernels.permute.triton import Alignment, align
from tetrarch.moe.runners.reference import ReferenceRunner
from tetrarch.moe.runners.triton import TritonRunner
from tetrarch.moe.types import (
    CanonicalExperts,
    Dispatched,
    ExpertActivation,
    ExpertSpec,
    PlainExperts,
    Routing,
)
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import (
    WEIGHT_RECIPE,
    Activations,
    Quantization,
    SourceFormat,
    contract_for,
)

ROOT = Path(__file__).parents[1]
BF16 = torch.bfloat16
TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
SHAPES = {  # experts, top-k, hidden, intermediate, gated
    "qwen3-30b": (128, 8, 2048, 768, True),
    "dsv3-ep8": (32, 8, 7168, 2048, True),
    "nemo3s": (512, 22, 1024, 2688, False),
}
CONTRACTS = {
    "W4A4": (Quantization.NVFP4_ONLINE, Activations.PER_TOKEN),
    "W4A16": (Quantization.NVFP4_ONLINE, Activations.BF16),
    "BF16": (Quantization.NONE, Activations.BF16),
}
CHECKED = 128  # tokens of a forward that are compared
PIECE = 8192  # int32 of codes that a program of the reading kernel takes


def spec_of(name: str, device: str) -> ExpertSpec:
    """Return the geometry of a shape."""
    experts, top_k, hidden, inner, gated = SHAPES[name]
    return ExpertSpec(
        num_experts=experts,
        num_local_experts=experts,
        first_local_expert=0,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        activation=ExpertActivation(gated=gated),
        has_bias=False,
        dtype=BF16,
        device=torch.device(device),
    )


def plans_of(contract_name: str, tokens: int) -> tuple[ExpertPlan, QuantPlan]:
    """Return the plans of a contract with room for so many tokens."""
    contract = contract_for(*CONTRACTS[contract_name])
    assert contract is not None
    fits = (row for row in SUPPORT if row.activations is contract.activations)
    experts = ExpertPlan(
        route=next(row for row in fits if row.runner == "triton"),
        finalize=Finalize.SEPARATE,
        budget=TokenBudget(per_rank=tokens, rows=tokens, term="the largest M"),
        decoded_cache=False,
    )
    quant = QuantPlan(
        contract=contract,
        source=SourceFormat.BF16,
        ignored_layers=(),
        weight_recipe=WEIGHT_RECIPE,
        activation_recipe=None,
        fc2_input_scale=1 / 2688,
    )
    return experts, quant


def random_experts(spec: ExpertSpec) -> CanonicalExperts:
    """Return NVFP4 weights whose outputs are of the inputs' size."""
    e, u, h, i = spec.num_experts, spec.num_up_rows, spec.hidden_size, spec.intermediate_size
    on: dict[str, Any] = {"device": spec.device}

    def scales(*shape: int) -> Tensor:
        return (torch.rand(shape, **on) * 400 + 1).to(torch.float8_e4m3fn)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, **on)

    one = torch.ones((), **on)
    return CanonicalExperts(
        gate_up=codes(e, u, h // 2),
        gate_up_block_scale=scales(e, u, h // 16),
        gate_up_global_scale=(torch.rand(e, len(spec.parts) - 1, **on) + 0.5) * h**-0.5 / 600,
        down=codes(e, h, i // 2),
        down_block_scale=scales(e, h, i // 16),
        down_global_scale=(torch.rand(e, **on) + 0.5) * i**-0.5 / 600,
        gate_up_input_scale=one,
        down_input_scale=one,
    )


def decoded(experts: CanonicalExperts) -> PlainExperts:
    """Return the same weights in BF16."""

    def one(codes: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        weight = nvfp4.decode_exact_products(codes, scale, dtype=torch.float32)
        return (weight.view(len(factor), -1) * factor[:, None]).view_as(weight).to(BF16)

    gates = zip(experts.gate_up, experts.gate_up_block_scale, experts.gate_up_global_scale)  # noqa: B905
    downs = zip(experts.down, experts.down_block_scale, experts.down_global_scale)  # noqa: B905
    return PlainExperts(
        gate_up=torch.stack([one(*each) for each in gates]),
        down=torch.stack([one(c, s, g.view(1)) for c, s, g in downs]),
    )


@dataclass
class Step:
    """M tokens and where they go."""

    hidden: Tensor
    routing: Routing
    tokens: int  # of a block
    order: Alignment

    @classmethod
    def of(cls, spec: ExpertSpec, hidden: Tensor, routing: Routing, tokens: int) -> Step:
        slots, on = routing.topk_ids.numel(), {"device": spec.device}
        blocks = max_blocks(slots, spec.num_experts, tokens)
        order = Alignment(
            sorted_slots=torch.empty(blocks * tokens, dtype=torch.int32, **on),
            expert=torch.empty(blocks, dtype=torch.int32, **on),
            num_blocks=torch.empty(1, dtype=torch.int32, **on),
            owned=torch.empty(slots, dtype=torch.bool, **on),
        )
        align(
            routing.topk_ids,
            first_expert=0,
            num_experts=spec.num_experts,
            block_tokens=tokens,
            out=order,
        )
        return cls(hidden, routing, tokens, order)


def steps_of(spec: ExpertSpec, tokens: int, *, block: int | None = None) -> list[Step]:
    """Return steps to rotate through; small ones hit experts in turn, so that none is cached."""
    count = 16 if tokens <= 4 else 8 if tokens <= 256 else 2
    deck = torch.cat([torch.randperm(spec.num_experts) for _ in range(64)])
    steps: list[Step] = []
    for index in range(count):
        if spec.top_k * tokens <= spec.num_experts:
            many = spec.top_k * tokens
            ids = deck[index * many : (index + 1) * many].view(tokens, spec.top_k)
        else:
            ids = torch.rand(tokens, spec.num_experts).topk(spec.top_k).indices
        weights = torch.rand(tokens, spec.top_k).softmax(-1)
        routing = Routing(ids.int().to(spec.device), weights.to(spec.device))
        hidden = torch.randn(tokens, spec.hidden_size, dtype=BF16, device=spec.device)
        size = block or block_tokens(ids.numel(), spec.num_experts, packed=True)
        steps.append(Step.of(spec, hidden, routing, size))
    return steps


@dataclass
class Layer:
    """One contract's runner, and its GEMMs on their own."""

    spec: ExpertSpec
    contract: str
    runner: TritonRunner
    weights: dict[str, Tensor]
    scratch: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        spec: ExpertSpec,
        contract: str,
        tokens: int,
        experts: CanonicalExperts | PlainExperts | None,
    ) -> Layer:
        """Build it; without experts its weights are empty."""
        runner = TritonRunner(spec, *plans_of(contract, tokens), ignored=False)
        empty = {name: need.empty() for name, need in runner.weight_specs().items()}
        weights = empty if experts is None else dict(runner.pack(experts))
        scratch = {name: need.empty() for name, need in runner.scratch_specs().items()}
        return cls(spec, contract, runner, weights, scratch)

    def __call__(self, step: Step) -> Tensor:
        arrived = Dispatched(step.hidden, None, step.routing)
        return self.runner.run(arrived, weights=self.weights, scratch=self.scratch)

    def gemm(self, name: str, step: Step, tile: Tile | None = None) -> None:
        """Run one of the GEMMs in W4A16 or BF16, with the activation where it has one."""
        packed, slots = self.contract != "BF16", step.routing.topk_ids.numel()
        activated = self.scratch["activated"][:slots]
        first, gated = name == "gate_up", self.spec.activation.gated
        rows = step.hidden if first else activated
        out = activated if first else self.scratch["down_rows"][:slots]
        weight = Weight(
            words=self.weights[name],
            block_scale=self.weights[f"{name}_block_scale"] if packed else None,
            scale=self.weights[f"{name}_scale"] if packed else None,
            bias=None,
            num_rows=self.spec.matrices[name][0],
        )
        tile = tile or tile_for(step.tokens, rows.shape[1], packed=packed, dtype=BF16, ptx=True)
        activation = ("swiglu" if gated else "relu2") if first else "none"
        after = Epilogue(out=out, activation=activation)
        grouped_gemm(rows, weight, order=step.order, tile=tile, epilogue=after)

    def gemms(self, step: Step) -> None:
        """Run both."""
        self.gemm("gate_up", step)
        self.gemm("down", step)


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


def timed(launches: list[Callable[[], object]], *, seconds: float = 0.06) -> float:
    """Return microseconds of one launch: median over replays of a graph of all of them."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    graph.replay()
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 50):
        begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(begin.elapsed_time(stop) * 1e3 / len(launches))
    return statistics.median(samples)


def over(steps: list[Step], run: Callable[[Step], object]) -> list[Callable[[], object]]:
    """Bind each step."""
    return [lambda step=step: run(step) for step in steps]


def ceilings() -> dict[str, float]:
    """Measure what the card can do: TB/s of a copy and of reading, BF16 TFLOP/s."""
    source = torch.empty(1 << 28, device="cuda")  # `copy_` itself reaches two thirds of this
    target = torch.empty_like(source)
    copy = timed([lambda: torch.neg(source, out=target)])
    layer = Layer.of(spec_of("qwen3-30b", "cuda"), "W4A16", 1, None)
    every = torch.arange(128, dtype=torch.int32, device="cuda")
    out = torch.empty(1, dtype=torch.int32, device="cuda")
    names = ("gate_up", "down")
    reads = timed([lambda name=name: read(layer, name, every, out) for name in names])
    size = sum(layer.weights[n].nbytes + layer.weights[f"{n}_block_scale"].nbytes for n in names)
    a = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    product = timed([lambda: a @ a])
    return {
        "copy TB/s": 2 * source.nbytes / copy / 1e6,
        "read TB/s": size / 2 / reads / 1e6,
        "bf16 TFLOP/s": 2 * 8192**3 / product / 1e6,
    }


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
                        times.append((timed(launch, seconds=0.01), tile))
                    except triton.runtime.errors.OutOfResources as error:
                        print(name, m, gemm, tile, error)
        for gemm, times in found.items():
            best = sorted(times, key=lambda pair: pair[0])
            rows += [{"shape": name, "M": m, "gemm": gemm, "us": t, **asdict(x)} for t, x in best]
            print(f"{name:10}{m:6} {gemm}", flush=True)
            for us, tile in best[:4]:
                print(f"    {us:9.1f}  {tile}")
    return rows


def compile_layer(job: tuple[str, str, int]) -> int:
    """Compile what a layer of M tokens launches, into Triton's cache, without the GPU."""
    name, contract, m = job
    compiled = compile_for(SM)
    step, layer = meta_step(name, m, None), Layer.of(spec_of(name, "meta"), contract, m, None)
    layer(step)
    return len(compiled)


def compile_tile(job: tuple[str, str, int, Tile]) -> int:
    """Compile one candidate of a sweep."""
    name, gemm, m, tile = job
    compiled = compile_for(SM)
    layer = Layer.of(spec_of(name, "meta"), "W4A16", m, None)
    layer.gemm(gemm, meta_step(name, m, tile.tokens), tile)
    return len(compiled)


def meta_step(name: str, m: int, block: int | None) -> Step:
    """Return a step of tensors without memory."""
    spec, on = spec_of(name, "meta"), {"device": "meta"}
    ids = torch.empty(m, spec.top_k, dtype=torch.int32, **on)
    routing = Routing(ids, torch.empty(m, spec.top_k, **on))
    hidden = torch.empty(m, spec.hidden_size, dtype=BF16, **on)
    size = block or block_tokens(ids.numel(), spec.num_experts, packed=True)
    return Step.of(spec, hidden, routing, size)


SM = int(os.environ.get("EXPERTS_GPU_SM", "90"))  # handed to the compiling processes


def in_parallel(work: Callable[[Any], int], jobs: Iterable[Any]) -> int:
    """Compile in as many processes as there are cores; the results are in Triton's cache."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        return sum(pool.map(work, jobs))


def provenance() -> dict[str, Any]:
    """Return command, date, commit, card and versions."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or "not a checkout",
        "gpu": card,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Compile, check, measure, print, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="try other tiles instead")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    os.environ["EXPERTS_GPU_SM"] = str(10 * major + minor)
    torch.manual_seed(0)
    start = time.perf_counter()
    if args.sweep:
        jobs = [
            (name, gemm, m, tile)
            for name, m, gemm in itertools.product(args.shapes, args.tokens, ("gate_up", "down"))
            for block in blocks_for(spec_of(name, "meta"), m)
            for tile in fitting(spec_of(name, "meta"), gemm, block)
        ]
        count = in_parallel(compile_tile, {(n, g, t): (n, g, m, t) for n, g, m, t in jobs}.values())
    else:
        count = in_parallel(compile_layer, itertools.product(args.shapes, CONTRACTS, args.tokens))
    print(f"{count} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)
    result: dict[str, Any] = {"benchmark": "experts_gpu", **provenance(), "ceilings": ceilings()}
    print({name: round(value, 2) for name, value in result["ceilings"].items()})
    if args.sweep:
        result["tiles"] = [row for name in args.shapes for row in sweep(name, args.tokens)]
    else:
        heads = "".join(f"{column:>12}" for column in COLUMNS)
        print(f"us {'':7}{'M':>6}{heads}{'of it':>8}{'x BF16':>8}  equal to FP32, by contract")
        result["rows"] = [
            row for name in args.shapes for row in measure(name, args.tokens, result["ceilings"])
        ]
    print(f"{time.perf_counter() - start:.0f} s in all")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
