# SPDX-License-Identifier: Apache-2.0
"""What does a layer cost around its experts and its attention?

    python benchmarks/layer_gpu.py [--json results.json]

Qwen3-30B-A3B's layers, random weights, replayed as a CUDA graph; experts are replaced by a copy,
attention by a copy and two writes of keys and values. Kernels and microseconds a layer, the
difference between 12 and 2 layers, at 1, 16 and 64 tokens, beside the time in which the same GPU
reads a layer's weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from measure import machine, read_ceiling, time_graph, write
from torch import Tensor, nn

from tetrarch.attention.backends import REFERENCE
from tetrarch.attention.layer import CONTEXT, AttentionCall, AttentionRows, rows_of
from tetrarch.memory.slots import SlotTable
from tetrarch.models.build import Model
from tetrarch.models.compiled import compile_layers
from tetrarch.models.materialise import materialise, shorten_lookups
from tetrarch.models.norms import fuse_norms
from tetrarch.models.one_row import one_row
from tetrarch.models.routers import swap_routers
from tetrarch.models.skeleton import read_skeleton, swap_module
from tetrarch.models.surgery import join_products

QWEN3_30B = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=1024,  # the embedding and the head are none of the question
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
LAYERS, FEW = 12, 2
GPU = torch.device("cuda")
TOKENS = (1, 16, 64)
DTYPE = torch.bfloat16


class CopyExperts(nn.Module):
    """Stands for the experts: one copy."""

    def forward(self, hidden_states: Tensor, *_routing: Tensor) -> Tensor:
        """Return the tokens."""
        return hidden_states.clone()


class CopyAttention:
    """Stands for attention: two writes and a copy."""

    def __init__(self, tokens: int) -> None:
        self._pool = torch.zeros(2, 4096, 4, 128, dtype=DTYPE, device=GPU)
        self._at = torch.arange(tokens, device=GPU)

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Answer the layer."""
        return self.attend_rows(0, rows_of(module, call, None))[None]

    def attend_rows(self, _site: int, rows: AttentionRows) -> Tensor:
        """Answer the compiled layer."""
        self._pool[0].index_copy_(0, self._at, rows.key)
        self._pool[1].index_copy_(0, self._at, rows.value)
        return rows.query.clone()


def build(*, joined: bool = False) -> Model:
    """Return the model with its stand-ins; `joined`: products of the same rows are one."""
    with tempfile.TemporaryDirectory() as folder:
        config = dict(QWEN3_30B, num_hidden_layers=LAYERS)
        Path(folder, "config.json").write_text(json.dumps(config))
        skeleton = read_skeleton(folder, dtype=DTYPE)
    experts = {site.path: CopyExperts() for site in skeleton.experts}
    for path, module in experts.items():
        swap_module(skeleton.model, path, module)
    if joined:
        join_products(skeleton.model, one_row)
    weights = materialise(skeleton.model, SlotTable(), dtype=DTYPE, device=GPU)
    torch.manual_seed(0)
    for name, slot in weights.items():
        slot.normal_(0, 0.02).add_(1.0 if "norm" in name else 0.0)
    return Model(
        hf=skeleton.model,
        names=skeleton.names,
        experts=cast("Any", experts),
        ignored=frozenset(),
        sites=skeleton.attention,
        attention=REFERENCE,
        weights=weights,
        scratch=SlotTable(),
        dtype=DTYPE,
        device=GPU,
        vocab_size=1024,
        deterministic=False,
    )


@dataclass(frozen=True)
class Layers:
    """The body of a model at one number of tokens."""

    model: Model
    tokens: int
    context: CopyAttention

    def run(self) -> Tensor:
        """Run it."""
        ids = torch.zeros(1, self.tokens, dtype=torch.int64, device=GPU)
        arguments = {"position_ids": ids, "use_cache": False, CONTEXT: self.context}
        return self.model.hf.base_model(input_ids=ids, **arguments).last_hidden_state

    def measure(self) -> dict[str, Any]:
        """Return kernels and microseconds of a layer."""
        config, found = self.model.hf.config, {}
        for count in (FEW, LAYERS):
            config.num_hidden_layers = count
            found[count] = self._replayed()
        (few, few_s), (many, many_s) = found[FEW], found[LAYERS]
        difference = {k: n - few[k] for k, n in many.items() if n > few[k]}
        kernels = {k: n / (LAYERS - FEW) for k, n in difference.items()}
        us = (many_s - few_s) / (LAYERS - FEW) * 1e6
        return {"kernels": sum(kernels.values()), "us": us, "names": kernels}

    def _replayed(self) -> tuple[Counter[str], float]:
        graph = torch.cuda.CUDAGraph()
        for _ in range(3):
            self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.run()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            graph.replay()
            torch.cuda.synchronize()
        names = Counter(
            e.name()
            for e in profile.profiler.kineto_results.events()
            if e.device_type() == torch.profiler.DeviceType.CUDA
        )
        return names, time_graph([self.run])


def eager(model: Model) -> None:
    """Leave transformers' layers as they are."""


def fused_norms(model: Model) -> None:
    """Fuse norms only, as without a compiler."""
    fuse_norms(model.hf, dtype=DTYPE, device=GPU)


def compiled(model: Model) -> None:
    """Compile and no more."""
    fused_norms(model)
    compile_layers(model)


def with_swaps(model: Model, **options: bool) -> None:
    """Compile as the engine does, with the swaps that agree with what they replace."""
    fused_norms(model)
    swap_routers(model.hf)
    compile_layers(model, options=options or None)


# Whether products are joined, and what is done to the loaded model.
VARIANTS: dict[str, tuple[bool, Callable[[Model], None]]] = {
    "transformers": (False, eager),
    "fused norms": (False, fused_norms),
    "compiled": (False, compiled),
    "compiled, routers": (False, with_swaps),
    "compiled, routers, products": (True, with_swaps),
    "the same, small ones combined": (True, partial(with_swaps, combo_kernels=True)),
}


@torch.inference_mode()
def measure(prepare: Callable[[Model], None], *, joined: bool = False) -> dict[str, Any]:
    """Return what one way to run the layers costs."""
    torch.compiler.reset()
    model = build(joined=joined)
    prepare(model)
    shorten_lookups(model.hf)
    began = time.perf_counter()
    for tokens in TOKENS:
        Layers(model, tokens, CopyAttention(tokens)).run()
    torch.cuda.synchronize()
    start_up = time.perf_counter() - began
    rows = {t: Layers(model, t, CopyAttention(t)).measure() for t in TOKENS}
    size = sum(
        slot.numel() * slot.element_size()
        for name, slot in model.weights.items()
        if name.startswith("model.layers.0.")
    )
    return {"start_up_s": start_up, "layer_bytes": size, "tokens": rows}


def main() -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--names", action="store_true", help="list the kernels of one token")
    args = parser.parse_args()
    result: dict[str, Any] = machine() | {"read_ceiling_tb_s": read_ceiling() / 1e12}
    ceiling = result["read_ceiling_tb_s"]
    print(f"{'variant':28} start-up s  kernels   us a layer at {TOKENS}   read ceiling us")
    for name, (joined, prepare) in VARIANTS.items():
        row = result[name] = measure(prepare, joined=joined)
        cells = [f"{row['tokens'][t]['us']:6.1f}" for t in TOKENS]
        counts = "/".join(f"{row['tokens'][t]['kernels']:.1f}" for t in TOKENS)
        least = row["layer_bytes"] / ceiling / 1e6
        print(
            f"{name:28} {row['start_up_s']:10.1f} {counts:14} {' '.join(cells)} {least:6.1f}",
            flush=True,
        )
        for kernel, count in sorted(row["tokens"][1]["names"].items()) if args.names else ():
            print(f"    {count:5.1f} {kernel[:110]}")
        write(result, args.json)


if __name__ == "__main__":
    main()
