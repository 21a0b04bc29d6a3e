# SPDX-License-Identifier: Apache-2.0
"""How fast do weights come from files onto one GPU, at the start and in a reload?

    python benchmarks/load_gpu.py [--layers 8] [--folder DIR] [--rounds 3] [--json results.json]

Checkpoints of some layers of Qwen3-30B-A3B's shape are written first, in BF16 and in NVFP4 as
ModelOpt stores it, so that files are in the page cache. Each contract is loaded and reloaded. In
the same run: what a pinned copy to the GPU reaches (the ceiling), what reading reaches, what
arriving on the GPU reaches when nothing is done with the tensors, and what quantizing and packing
reach when they are on the GPU already. Rates count bytes as stored. Memory is what the device had
at most beyond the finished model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import copy_ceiling, machine, write  # first: it finds the sources
from safetensors.torch import save_file
from torch import Tensor

from tetrarch.config.cli import read_keywords
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import Plan
from tetrarch.core.progress import NoProgress
from tetrarch.executor.executor import Executor
from tetrarch.executor.weights import WeightStore
from tetrarch.models.build import build_model
from tetrarch.models.describe import describe
from tetrarch.models.load import load_weights
from tetrarch.models.placement import place
from tetrarch.models.sources import TensorSource, open_checkpoint

CONFIG = Path(__file__).parent / "configs" / "qwen3_30b_a3b" / "config.json"
CONTRACTS = (  # files, settings
    ("bf16", {"quantization": "none"}),
    ("bf16", {"quantization": "nvfp4_online"}),
    ("bf16", {"quantization": "nvfp4_online", "moe_activations": "bf16"}),
    ("nvfp4", {"quantization": "modelopt_fp4", "moe_activations": "per_token"}),
)
SMALL = {"max_total_tokens": 4096, "context_length": 1024, "max_running_requests": 8}


def matrix(rows: int, width: int) -> Tensor:
    """A random BF16 weight, on the host."""
    return (torch.randn(rows, width, device="cuda") * width**-0.5).to(torch.bfloat16).cpu()


def dense_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Everything of one layer but its experts."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    tensors = {f"self_attn.{name}_proj": matrix(*shape) for name, shape in shapes.items()}
    tensors["self_attn.o_proj"] = matrix(hidden, queries)
    tensors["mlp.gate"] = matrix(config["num_experts"], hidden)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[name] = torch.ones(hidden, dtype=torch.bfloat16)
    for name in ("q", "k"):
        tensors[f"self_attn.{name}_norm"] = torch.ones(head, dtype=torch.bfloat16)
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def expert_tensors(config: dict[str, Any], kind: str) -> Iterator[tuple[str, Tensor]]:
    """The experts of one layer."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for expert in range(config["num_experts"]):
        for part, (rows, width) in {
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }.items():
            name = f"mlp.experts.{expert}.{part}_proj"
            if kind == "bf16":
                yield f"{name}.weight", matrix(rows, width)
                continue
            yield f"{name}.weight", torch.randint(256, (rows, width // 2), dtype=torch.uint8)
            scales = torch.randint(0x70, 0x78, (rows, width // 16), dtype=torch.uint8)
            yield f"{name}.weight_scale", scales.view(torch.float8_e4m3fn)
            yield f"{name}.weight_scale_2", torch.tensor(width**-0.5 / 549.0)
            yield f"{name}.input_scale", torch.tensor(0.003)


def write_checkpoint(folder: Path, kind: str, layers: int) -> Path:
    """Write shards, one a layer, all with the same numbers."""
    folder.mkdir(parents=True)
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": layers}
    if kind == "nvfp4":
        dense = ["lm_head", "*self_attn*", "*mlp.gate"]
        quant = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": dense}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quant}))
    (folder / "config.json").write_text(json.dumps(config))
    layer = dense_tensors(config) | dict(expert_tensors(config, kind))
    vocab = config["vocab_size"], config["hidden_size"]
    rest = {"model.embed_tokens.weight": matrix(*vocab), "lm_head.weight": matrix(*vocab)}
    rest["model.norm.weight"] = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    index: dict[str, str] = {}
    shards = [{f"model.layers.{i}.{name}": t for name, t in layer.items()} for i in range(layers)]
    for number, tensors in enumerate([*shards, rest]):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    words = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(words)
    return folder


def plan_of(folder: Path, settings: dict[str, Any]) -> Plan:
    """Resolve as `tetrarch serve --skip-tokenizer-init` would."""
    keywords = {"model": str(folder), "skip_tokenizer_init": True, **SMALL, **settings}
    return plan_launch(read_keywords(keywords, {}), describe=describe)


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long something takes, the device's part included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def copy_rate() -> float:
    """Return the bytes a second of copies from pinned memory to the GPU."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / min(
        seconds_of(lambda: target.copy_(source, non_blocking=True)) for _ in range(5)
    )


def read_rate(folder: Path, threads: int) -> float:
    """Return the bytes a second of reading the shards and dropping them."""

    def read(path: Path) -> int:
        buffer, size = bytearray(8 << 20), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
        return size

    paths = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        size = sum(pool.map(read, paths))
        return size / (time.perf_counter() - began)


def measure(folder: Path, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return one row: the phases of a start, and of a reload."""
    row: dict[str, Any] = dict(settings)
    began = time.perf_counter()
    plan = plan_of(folder, settings)
    row["plan_s"] = time.perf_counter() - began
    torch.cuda.empty_cache()
    began = time.perf_counter()
    model = build_model(plan)
    torch.cuda.synchronize()
    row["build_s"] = time.perf_counter() - began
    source = open_checkpoint(plan, plan.model.path)
    began = time.perf_counter()
    placed = place(model, source, plan.quant)
    row["place_s"] = time.perf_counter() - began
    names = placed.reading_order()
    size = sum(source.headers[name].num_bytes for name in names)
    row["stored_gb"] = size / 1e9

    def load(given: Any) -> Callable[[], object]:
        quant, progress = plan.quant, NoProgress()
        return lambda: load_weights(model, given, plan=quant, progress=progress, placements=placed)

    seconds_of(load(source))  # compiles what quantizes
    final = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row["load_s"] = min(seconds_of(load(source)) for _ in range(rounds))
    row["peak_over_final_gb"] = (torch.cuda.max_memory_allocated() - final) / 1e9
    row["host_growth_gb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) / 1e6
    layer = next(iter(model.experts.values())).weights.num_bytes
    row["layer_gb"] = layer / 1e9
    stored = [source.headers[name].num_bytes for name in names if ".layers.0.mlp.experts" in name]
    row["layer_as_stored_gb"] = sum(stored) / 1e9
    row["load_gb_per_s"] = size / row["load_s"] / 1e9

    def arrive() -> None:
        for _ in source.read(names):
            pass

    row["arrive_gb_per_s"] = size / min(seconds_of(arrive) for _ in range(rounds)) / 1e9
    there = TensorSource({name: tensor.cuda() for name, tensor in source.read(names)})
    row["quantize_and_pack_gb_per_s"] = size / min(seconds_of(load(there)) for _ in range(2)) / 1e9
    del there
    row |= reload(model, plan, rounds)
    return row


def reload(model: Any, plan: Plan, rounds: int) -> dict[str, float]:
    """Return how long an update from the same folder takes, with and without an undo copy."""
    store = WeightStore(model, plan, free_host=lambda: 1 << 40)
    store.load(NoProgress())
    plans, found = list[float](), dict[str, float]()
    for atomic in (False, True):
        seconds: list[float] = []
        for _ in range(1 if atomic else rounds):
            update = store.plan(plan.model.path, atomic=atomic)
            plans.append(update.seconds)
            seconds.append(seconds_of(lambda update=update: store.commit(update)))
        report = min(seconds)
        found["reload_atomic_s" if atomic else "reload_s"] = report
    size = sum(
        header.num_bytes for header in open_checkpoint(plan, plan.model.path).headers.values()
    )
    found["reload_plan_s"] = min(plans)
    found["reload_gb_per_s"] = size / found["reload_s"] / 1e9
    return found


def start(folder: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Return what a whole start takes, capture included, in a process that has loaded before."""
    plan = plan_of(folder, settings)
    began = time.perf_counter()
    executor = Executor(plan)
    torch.cuda.synchronize()
    total = time.perf_counter() - began
    return {"executor_s": total, "of_it_load_s": executor.load_report.seconds}


def import_seconds() -> float:
    """Return how long a fresh process takes to import the engine."""
    began = time.perf_counter()
    source = str(Path(__file__).parents[1] / "src")
    code = f"import sys; sys.path.insert(0, {source!r}); import tetrarch.engine.child"
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    cells = [f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
    print("  ".join(cells), flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "benchmark": "load_gpu",
        **machine(),
        "layers": args.layers,
        "import_s": import_seconds(),
        "pinned_copy_gb_per_s": copy_rate() / 1e9,
        "device_copy_gb_per_s": copy_ceiling() / 1e9,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folders: dict[str, Path] = {}
        for kind in dict(CONTRACTS):
            began = time.perf_counter()
            folders[kind] = write_checkpoint(Path(scratch) / kind, kind, args.layers)
            print(f"wrote {kind} in {time.perf_counter() - began:.0f} s", flush=True)
        for threads in (1, 8):
            rate = read_rate(folders["bf16"], threads) / 1e9
            result[f"read_gb_per_s_{threads}_threads"] = rate
        show({key: value for key, value in result.items() if key != "rows"})
        for kind, settings in CONTRACTS:
            row = {"files": kind, **measure(folders[kind], settings, args.rounds)}
            result["rows"].append(row)
            show(row)
            write(result, args.json)
        result["start"] = start(folders["bf16"], CONTRACTS[1][1])
        show(result["start"])
        write(result, args.json)


if __name__ == "__main__":
    main()
