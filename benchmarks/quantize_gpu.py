# SPDX-License-Identifier: Apache-2.0
"""How close do quantize, align and finalize come to copying, on one GPU?

    python benchmarks/quantize_gpu.py [--sweep] [--json results.json]

Every result is compared with the reference on the same device before it is timed. A graph of
launches over buffers that together exceed the L2 cache is replayed; GB/s count what must be read
and written once, and the ceiling is a copy of 1 GiB in the same run. Launch-bound rows (a few
microseconds) say so by their time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
from measure import BEYOND_CACHE, copy_ceiling, machine, time_graph, write
from torch import Tensor

from tetrarch.kernels.grouped_gemm.tiles import max_blocks
from tetrarch.kernels.permute import reference as permute_reference
from tetrarch.kernels.permute.triton import Alignment, align, counts_size, finalize
from tetrarch.kernels.quantize import triton as quantize
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe

BF16 = torch.bfloat16
WIDTHS = (768, 2048, 2688, 7168)
# tokens, experts a token, experts, hidden size
ROUTINGS = (
    (1, 8, 128, 2048),
    (64, 8, 128, 2048),
    (64, 22, 512, 1024),
    (1024, 8, 128, 2048),
    (4096, 22, 512, 1024),
    (16384, 8, 128, 2048),
)


@dataclass(frozen=True)
class Case:
    """One launch with buffers of its own."""

    run: Callable[[], object]
    size: int  # bytes that must be read and written once; 0 where bandwidth is no question
    tensors: tuple[Tensor, ...]  # inputs, then outputs


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    shape: str
    microseconds: float
    gb_per_s: float
    percent_of_copy: float
    equal: bool


class Bench:
    """Measures, prints and keeps rows."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        """Measure the ceiling; with `words`, only kernels whose names have one of them."""
        self.rows: list[Row] = []
        self.words = words
        self.ceiling = copy_ceiling()

    def add(
        self,
        kernel: str,
        shape: Sequence[int],
        make: Callable[[], Case],
        check: Callable[..., bool],
    ) -> None:
        """Check one launch with `check(*tensors)`, then time as many as are beyond the L2 cache."""
        if self.words and not any(word in kernel for word in self.words):
            return
        first = make()
        first.run()
        equal = check(*first.tensors)
        count = max(1, min(64, BEYOND_CACHE // first.size)) if first.size else 1
        launches = [first.run, *(make().run for _ in range(count - 1))]
        seconds = time_graph(launches * max(1, 32 // count))
        rate = first.size / seconds
        words = " x ".join(map(str, shape))
        row = Row(kernel, words, seconds * 1e6, rate / 1e9, 100 * rate / self.ceiling, equal)
        self.rows.append(row)
        print(
            f"{kernel:26}{words:>22}{row.microseconds:10.1f} us{row.gb_per_s:8.0f} GB/s"
            f"{row.percent_of_copy:7.1f} % of copy  {'equal' if equal else 'DIFFERENT BITS'}",
            flush=True,
        )


def same(mine: Tensor, defined: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    octets = [values.flatten().view(torch.uint8) for values in (mine, defined)]
    return torch.equal(*octets)


def rounded_rows(shape: tuple[int, int], recipe: Recipe | None, scale: Tensor | None) -> Case:
    """Products, per token or under `scale`."""
    x = torch.randn(shape, device="cuda").to(BF16)
    values, token = torch.empty_like(x), torch.empty(shape[0], device="cuda")
    if scale is not None:
        run = partial(quantize.round_rows, x, values=values, encode_scale=scale, recipe=recipe)
    else:
        run = partial(quantize.round_rows, x, values=values, token_scale=token, recipe=recipe)
    return Case(run, 2 * x.nbytes, (x, values, token))


def check_rows(
    x: Tensor, values: Tensor, token: Tensor, *, recipe: Recipe | None, scale: Tensor | None
) -> bool:
    """Whether products and token scales are the definition's."""
    if scale is not None:
        return same(values, nvfp4.fake_quant(x, encode_scale=scale, recipe=recipe, dtype=BF16))
    products, scales = nvfp4.fake_quant_per_token(x, recipe=recipe, dtype=BF16)
    return same(values, products) and same(token, scales)


def encoded_weights(shape: tuple[int, int, int]) -> Case:
    """Packed codes and scales of a stack: the pass for magnitudes and the one for codes."""
    experts, rows, width = shape
    x = torch.randn(shape, device="cuda").to(BF16)
    codes = torch.empty(experts, rows, width // 2, dtype=torch.uint8, device="cuda")
    scales = torch.empty(experts, rows, width // 16, dtype=torch.float8_e4m3fn, device="cuda")
    global_scale, amax = torch.empty(2, experts, device="cuda")
    run = partial(
        quantize.encode_weights,
        x,
        codes=codes,
        block_scale=scales,
        global_scale=global_scale,
        amax=amax,
    )
    return Case(run, x.nbytes + codes.nbytes + scales.nbytes, (x, codes, scales, global_scale))


def check_weights(x: Tensor, *outputs: Tensor) -> bool:
    """Whether the last weight of a stack is the definition's."""
    defined = nvfp4.encode_weight(x[-1], WEIGHT_RECIPE)
    return all(same(mine[-1], theirs) for mine, theirs in zip(outputs, defined, strict=True))


def aligned_slots(ids: Tensor, experts: int) -> Case:
    """Slots sorted into blocks."""
    block = 16 if ids.shape[0] < 1024 else 64
    most = max_blocks(ids.numel(), experts, block)
    out = Alignment(
        sorted_slots=torch.empty(most * block, dtype=torch.int32, device="cuda"),
        expert=torch.empty(most, dtype=torch.int32, device="cuda"),
        num_blocks=torch.empty(1, dtype=torch.int32, device="cuda"),
        owned=torch.empty(ids.numel(), dtype=torch.bool, device="cuda"),
        counts=torch.empty(counts_size(ids.numel(), experts), dtype=torch.int32, device="cuda"),
    )
    run = partial(align, ids, first_expert=0, num_experts=experts, block_tokens=block, out=out)
    return Case(run, 0, (ids, out.sorted_slots, out.num_blocks))


def check_slots(ids: Tensor, sorted_slots: Tensor, num_blocks: Tensor) -> bool:
    """Whether slots are in the reference's order."""
    block = 16 if ids.shape[0] < 1024 else 64
    used = sorted_slots[: int(num_blocks) * block]
    order = permute_reference.permute(ids, first_expert=0, num_experts=1 << 20)
    return torch.equal(used[used < ids.numel()].long(), order.position)


def summed_rows(tokens: int, top_k: int, hidden: int) -> Case:
    """Each token's rows added up."""
    weights = torch.rand(tokens, top_k, device="cuda")
    rows = torch.randn(tokens * top_k, hidden, device="cuda").to(BF16)
    owned = torch.ones(tokens * top_k, dtype=torch.bool, device="cuda")
    result = torch.empty(tokens, hidden, dtype=BF16, device="cuda")
    run = partial(finalize, rows, topk_weights=weights, owned=owned, out=result)
    return Case(run, rows.nbytes + result.nbytes, (rows, weights, result))


def check_sums(rows: Tensor, weights: Tensor, result: Tensor) -> bool:
    """Whether sums are those of FP32 from left to right."""
    terms = (rows.float().view(*weights.shape, -1) * weights[:, :, None]).unbind(1)
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return same(result, total.to(BF16))


def bench_all(bench: Bench) -> None:
    """Every kernel at the shapes of real models, from one token to a prompt."""
    scale = torch.tensor(100.0, device="cuda")
    kinds: dict[str, tuple[Recipe | None, Tensor | None]] = {
        "round, per token": (None, None),
        "round, per tensor": (None, scale),
        "round, per token, 4over6": (Recipe(), None),
    }
    for shape in product((1, 64, 4096, 16384), WIDTHS):
        for name, (recipe, given) in kinds.items():
            make = partial(rounded_rows, shape, recipe, given)
            bench.add(name, shape, make, partial(check_rows, recipe=recipe, scale=given))
    for stack in ((32, 1536, 2048), (8, 4096, 7168), (1, 2048, 7168)):
        bench.add("encode weights, 4over6", stack, partial(encoded_weights, stack), check_weights)
    for tokens, top_k, experts, hidden in ROUTINGS:
        ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
        make = partial(aligned_slots, ids, experts)
        bench.add("align", (tokens, top_k, experts), make, check_slots)
        sums = (tokens, top_k, hidden)
        bench.add("finalize", sums, partial(summed_rows, *sums), check_sums)


def sweep(bench: Bench) -> dict[str, dict[str, float]]:
    """Time the ways to cut 8192 rows into programs: percent of the ceiling, by width."""
    found: dict[str, dict[str, float]] = {}
    shape_of = quantize.tile_shape
    for width in WIDTHS:
        chosen, results = shape_of(8192, width), dict[str, float]()
        for rows, warps in product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
            per_thread = rows * triton.next_power_of_2(width) // (32 * warps)
            if 8 <= per_thread <= 64:
                quantize.tile_shape = partial(lambda shape, *_: shape, (rows, warps))
                cases = [rounded_rows((8192, width), None, None) for _ in range(4)]
                rate = cases[0].size / time_graph([case.run for case in cases])
                results[f"{rows} rows, {warps} warps"] = 100 * rate / bench.ceiling
        quantize.tile_shape = shape_of
        best = sorted(results, key=results.__getitem__, reverse=True)[:3]
        name = "{} rows, {} warps".format(*chosen)
        words = "; ".join(f"{way}: {results[way]:.1f} %" for way in (*best, name))
        print(f"K = {width}: {words} (chosen)", flush=True)
        found[str(width)] = results
    return found


def main() -> None:
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also try other program shapes")
    parser.add_argument("--only", nargs="+", default=(), help="kernels with these words")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(args.only)
    print(f"copy ceiling {bench.ceiling / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
    bench_all(bench)
    found = sweep(bench) if args.sweep else {}
    result = {
        "benchmark": "quantize_gpu",
        **machine(),
        "copy TB/s": bench.ceiling / 1e12,
        "rows": [asdict(row) for row in bench.rows],
        "sweep_percent_of_copy": found,
    }
    write(result, args.json)
    different = [row for row in bench.rows if not row.equal]
    if different:
        raise SystemExit(f"{len(different)} results differ from the reference")


if __name__ == "__main__":
    main()
