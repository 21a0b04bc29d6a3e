# SPDX-License-Identifier: Apache-2.0
"""How fast are new weights read, checked, written and verified on the CPU?

    python benchmarks/reload_cpu.py [--gigabytes 2] [--rounds 3] [--folder DIR]

The demo model and a random Qwen3-MoE checkpoint of the given size are replaced in place by a copy
of themselves, with an undo copy, as `POST /update_weights_from_disk` does between two steps. Beside
each run the same files are read and nothing is done with them: the ceiling. `plan` is the check of
the headers; a third model, of fifty thousand small tensors, is planned only. Files are in the page
cache for both. Every number is a median over rounds; a JSON file goes to benchmarks/results/cpu/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import demo_model_path, read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.resolve import resolve
from tetrarch.executor.executor import Executor
from tetrarch.models.describe import describe

CONTRACTS = ("none", "nvfp4_online")
RESULTS = Path(__file__).parent / "results" / "cpu"
LARGE = dict(hidden_size=1024, moe_intermediate_size=512, num_experts=64)
MANY = dict(hidden_size=16, moe_intermediate_size=16, num_experts=128)


def config_of(num_layers: int, sizes: dict[str, int]) -> Qwen3MoeConfig:
    """Return the configuration of a synthetic model."""
    return Qwen3MoeConfig(
        vocab_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes["hidden_size"] // 4,
        intermediate_size=64,
        num_experts_per_tok=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **sizes,
    )


def tensors_of(config: Qwen3MoeConfig, layer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield one layer's tensors."""
    hidden, inner, head = config.hidden_size, config.moe_intermediate_size, config.head_dim
    stem = f"model.layers.{layer}"
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (4 * head, hidden),
        "self_attn.k_proj": (2 * head, hidden),
        "self_attn.v_proj": (2 * head, hidden),
        "self_attn.o_proj": (hidden, 4 * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate": (config.num_experts, hidden),
    }
    for expert in range(config.num_experts):
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden))):
            shapes[f"mlp.experts.{expert}.{part}_proj"] = shape
        shapes[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
    for name, shape in shapes.items():
        yield f"{stem}.{name}.weight", (torch.randn(shape) * 0.05).to(torch.bfloat16)


def write_checkpoint(folder: Path, num_layers: int, sizes: dict[str, int]) -> Path:
    """Write a random checkpoint, one shard a layer."""
    folder.mkdir(parents=True)
    config = config_of(num_layers, sizes)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    index: dict[str, str] = {}
    for layer in range(num_layers):
        tensors = dict(tensors_of(config, layer))
        if layer == 0:
            vocab = (config.vocab_size, config.hidden_size)
            tensors |= {
                "model.embed_tokens.weight": torch.randn(vocab).to(torch.bfloat16),
                "lm_head.weight": torch.randn(vocab).to(torch.bfloat16),
                "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.bfloat16),
            }
        shard = f"model-{layer + 1:05d}-of-{num_layers:05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard)
    words = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(words)
    return folder


def build(path: str, quantization: str) -> Executor:
    """Load a model as `tetrarch serve` would."""
    args = LaunchArgs(model=path, quantization=quantization, device="cpu", max_running_requests=2)
    return Executor(resolve(args, read_checkpoint(path), describe(path), detect("cpu")))


def read_plainly(folder: Path) -> tuple[int, float]:
    """Read the weights and drop them; return bytes and seconds."""
    buffer, size = bytearray(16 << 20), 0
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    return size, time.perf_counter() - began


def measure(path: str, quantization: str, rounds: int) -> dict[str, Any]:
    """Return one line of the result."""
    store = build(path, quantization).weights
    plans, updates, reads = list[float](), list[float](), list[float]()
    size = 0
    for _ in range(rounds):
        size, seconds = read_plainly(Path(path))
        reads.append(seconds)
        update = store.plan(path, atomic=True)
        plans.append(update.seconds)
        updates.append(store.commit(update).seconds)
    update_s, read_s = statistics.median(updates), statistics.median(reads)
    return {
        "quantization": quantization,
        "megabytes": round(size / 1e6, 1),
        "plan_s": round(statistics.median(plans), 4),
        "update_s": round(update_s, 3),
        "update_mb_per_s": round(size / 1e6 / update_s, 1),
        "plain_read_mb_per_s": round(size / 1e6 / read_s, 1),
    }


def measure_plan(folder: Path, num_layers: int) -> dict[str, Any]:
    """Return how long headers take: names seen for the first time, then known ones."""
    path = str(write_checkpoint(folder, num_layers, MANY))
    store = build(path, "none").weights
    seconds = [store.plan(path, atomic=False).seconds for _ in range(3)]
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {"names": len(names), "plan_s": round(statistics.median(seconds), 3)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the synthetic checkpoints")
    parser.add_argument("--output", type=Path, default=RESULTS / "reload.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        layers = max(1, round(args.gigabytes * 1e9 / 2 / (64 * 3 * 1024 * 512)))
        large = str(write_checkpoint(Path(scratch) / "large", layers, LARGE))
        rows = [
            {"model": name, **measure(path, contract, args.rounds)}
            for name, path in (("demo", demo_model_path()), ("synthetic", large))
            for contract in CONTRACTS
        ]
        plan = measure_plan(Path(scratch) / "many", 130)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(plan)
    result = {"provenance": provenance(), "rows": rows, "plan_of_many_names": plan}
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
