# SPDX-License-Identifier: Apache-2.0
"""How long does one expert layer of the demo model take on the CPU?

    python benchmarks/experts_cpu.py [--threads 1] [--json results.json]

Random weights and routing in the demo model's shapes (hidden 256, intermediate 128, 8 experts,
top-2, bf16). Contracts are interleaved round by round, so that a busy machine hurts all alike;
the table shows medians, quantization of the activations included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from tetrarch.config.hardware import Arch
from tetrarch.config.plan import ExpertPlan, QuantPlan, TokenBudget
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.build import build_layer
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import ExpertActivation, ExpertSpec
from tetrarch.numerics.contract import (
    CONTRACTS,
    WEIGHT_RECIPE,
    QuantContract,
    SourceFormat,
)

SPEC = ExpertSpec(
    num_experts=8,
    num_local_experts=8,
    first_local_expert=0,
    top_k=2,
    hidden_size=256,
    intermediate_size=128,
    activation=ExpertActivation(),
    has_bias=False,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)


def build(contract: QuantContract, tokens: int, *, decoded_cache: bool) -> MoELayer:
    """Return a loaded layer with random weights."""
    fits = (row for row in SUPPORT if row.activations == contract.activations)
    route = next(row for row in fits if Arch.CPU in row.archs)
    budget = TokenBudget(per_rank=tokens, rows=tokens, term="the largest row of this benchmark")
    experts = ExpertPlan(
        route=route, finalize=Finalize.SEPARATE, budget=budget, decoded_cache=decoded_cache
    )
    quant = QuantPlan(
        contract=contract,
        source=SourceFormat.BF16,
        ignored_layers=(),
        weight_recipe=WEIGHT_RECIPE,
        activation_recipe=None,
        fc2_input_scale=1 / 2688,
    )
    layer = build_layer(SPEC, experts, quant, scratch=SlotTable())
    stager = ExpertStager(SPEC, quant)
    for expert in range(SPEC.num_experts):
        for part in SPEC.parts:
            weight = torch.randn(SPEC.shape_of(part), dtype=SPEC.dtype) * 0.05
            stager.put(part, expert, weight)
    layer.load(stager.finish(), Journal(keeps=False))
    return layer


def measure(layers: dict[str, MoELayer], num_tokens: int, rounds: int) -> dict[str, float]:
    """Return each layer's median microseconds for one forward of `num_tokens` tokens."""
    hidden = torch.randn(num_tokens, SPEC.hidden_size, dtype=SPEC.dtype)
    weights, ids = torch.rand(num_tokens, SPEC.num_experts).softmax(-1).topk(SPEC.top_k)
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            start = time.perf_counter()
            layer(hidden, ids, weights)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[3:]) * 1e6 for name, times in seconds.items()}


def main() -> None:
    """Print the table, and append one JSON line where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="append the result to this file, as one line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    largest = max(args.tokens)
    layers = {
        f"{contract.name}{'' if cache else ' no cache'}": build(
            contract, largest, decoded_cache=cache
        )
        for contract in CONTRACTS
        if SourceFormat.BF16 in contract.sources
        for cache in ((True, False) if contract.quantizes_weights else (False,))
    }
    with torch.inference_mode():
        columns = {tokens: measure(layers, tokens, args.rounds) for tokens in args.tokens}
    print(f"us a layer{'':28}" + "".join(f"{f'T={tokens}':>9}" for tokens in args.tokens))
    for name in layers:
        print(f"{name:38}" + "".join(f"{columns[t][name]:9.0f}" for t in args.tokens))
    if args.json is not None:
        row = {
            "benchmark": "experts_cpu",
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": args.threads,
            "us_per_layer": columns,
        }
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
