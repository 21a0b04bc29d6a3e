# SPDX-License-Identifier: Apache-2.0
"""How much of the GPU's memory and arithmetic does paged attention use?

    python benchmarks/attention_gpu.py [--json results.json]

Decode of B sequences of L keys (Qwen3-30B-A3B's heads, 32 queries to 4 of 128; MLA, 128 queries to
one latent of 512 + 64) in microseconds a layer and as a share of the read ceiling, which the same
run measures; prompts in TFLOP/s beside torch's SDPA. Pages lie in random order. Times are replays
of a CUDA graph that walks through several layers, so that a layer's keys are not in the cache.
Every number is checked against FP32 first, and bits where they must be equal.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_cases import GQA, LIMITS, MLA, Layer, Step, decode_step
from measure import machine, product_ceiling, read_ceiling, time_graph, write
from torch import Tensor
from torch.nn import functional as F

from tetrarch.kernels.attention import triton as paged

GRID = [(1, 32768), (8, 8192), (64, 1024), (64, 8192), (256, 1024)]


def decode(
    layer: Layer, shape: tuple[int, int], *, page: int, limits: Any, q_len: int = 1
) -> dict[str, Any]:
    """Check and time one shape."""
    step = decode_step(layer, shape, page=page, limits=limits, q_len=q_len)
    error = step.error()
    seconds = time_graph([step.run]) / step.layers
    keys = sum(kv_len for _, kv_len in step.lens)
    return {
        "layer": layer.name,
        "streams": shape[0],
        "keys": shape[1],
        "q_len": q_len,
        "page": page,
        "us": seconds * 1e6,
        "tb_s": layer.bytes_per_key * keys / seconds / 1e12,
        "tflop_s": layer.flop_per_pair * q_len * keys / seconds / 1e12,
        "error": error,
    }


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
    row["us"] = time_graph([step.run], seconds=0.15) * 1e6
    row["tflop_s"] = flop / row["us"] / 1e6
    if not layer.latent:
        q, k, v = (
            torch.randn(count, heads, length, layer.dim, device="cuda", dtype=torch.bfloat16)
            for heads in (layer.heads, layer.groups, layer.groups)
        )
        sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        row["sdpa_tflop_s"] = flop / time_graph([sdpa], seconds=0.15) / 1e12
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
        cut["cu_seqlens_q"] = torch.tensor([0, q_len], dtype=torch.int32, device="cuda")
        plan = paged.plan_batch(**cut, limits=step.limits, scratch=step.scratch)
        queries = [query[end - q_len : end].contiguous() for query in step.queries]
        if layer.latent:
            return paged.paged_latent_attention(*queries, *step.pools[0], plan, step.rule)
        return paged.paged_attention(queries[0], *step.pools[0], plan, step.rule)

    whole = Step(layer, [(400, 3000)], page=16, layers=1, limits=generous)
    specs = paged.scratch_specs(
        replace(generous, num_units=64), num_heads=layer.heads, out_dim=layer.out_dim, device="cuda"
    )
    whole.limits = replace(generous, num_units=64)
    whole.scratch = {name: spec.empty() for name, spec in specs.items()}
    prompt = whole.run()
    return {
        "batch": all(torch.equal(alone(r, 1, batch)[0], together[r]) for r in (0, 13, 40, 63)),
        "chunk": all(torch.equal(alone(0, n, whole), prompt[-n:]) for n in (1, 4, 33, 128)),
    }


def measure_decode(limits: Any, ceiling: float) -> list[dict[str, Any]]:
    """Measure every shape, print the table and return its rows."""
    jobs = [
        dict(layer=layer, shape=shape, page=page, limits=limits, q_len=1)
        for layer, page in ((GQA, 16), (GQA, 64), (MLA, 16), (MLA, 64))
        for shape in GRID
    ]
    verify = replace(limits, short_q_len=4)
    jobs += [dict(layer=x, shape=(64, 1024), page=64, limits=verify, q_len=4) for x in (GQA, MLA)]
    print(f"{'decode':18} page    B     L  new      us   TB/s  of ceiling  TF/s  error")
    rows: list[dict[str, Any]] = []
    for job in jobs:
        row: dict[str, Any] = decode(**job)
        row["of_ceiling"] = row["tb_s"] * 1e12 / ceiling
        rows.append(row)
        print(
            f"{row['layer']:18} {row['page']:4} {row['streams']:4} {row['keys']:5} "
            f"{row['q_len']:4} {row['us']:7.1f} {row['tb_s']:6.2f} {row['of_ceiling']:11.0%} "
            f"{row['tflop_s']:5.0f} {row['error']:6.3f}",
            flush=True,
        )
    return rows


def measure_prompts(limits: Any) -> list[dict[str, Any]]:
    """Measure prompts, print the table and return its rows."""
    rows: list[dict[str, Any]] = []
    print(f"{'prompts':18} page    B     T in spans      us  TF/s  SDPA  error")
    for layer, shapes in ((GQA, [(1, 8192), (8, 2048)]), (MLA, [(1, 4096)])):
        for shape in shapes:
            for page, exact in ((16, False), (64, False), (64, True)):
                cut = replace(limits, exact_prompts=exact)
                row = prompts(layer, shape, page=page, limits=cut)
                rows.append(row)
                print(
                    f"{layer.name:18} {page:4} {shape[0]:4} {shape[1]:5} {exact!s:>8} "
                    f"{row['us']:7.0f} {row['tflop_s']:5.0f} {row.get('sdpa_tflop_s', 0):5.0f} "
                    f"{row['error']:6.3f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Check, measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    limits = paged.limits_for(torch.device("cuda"), **LIMITS)
    result: dict[str, Any] = {"benchmark": "attention_gpu", **machine()}
    result["bits"] = {layer.name: bits(layer, limits) for layer in (GQA, MLA)}
    print("bits equal:", result["bits"], flush=True)
    ceiling = read_ceiling()
    result["ceilings"] = {"read TB/s": ceiling / 1e12, "bf16 TFLOP/s": product_ceiling() / 1e12}
    print(result["ceilings"], flush=True)
    result["decode"] = measure_decode(limits, ceiling)
    result["prompts"] = measure_prompts(limits)
    worst = max(row["error"] for name in ("decode", "prompts") for row in result[name])
    result["seconds"] = time.perf_counter() - began
    print(f"worst error {worst:.3f} of the root mean square; {result['seconds']:.0f} s")
    write(result, args.json)


if __name__ == "__main__":
    main()
