# SPDX-License-Identifier: Apache-2.0
"""Loading needs the finished model, one packed layer and one expert's raw matrices.

And so does loading again: new weights are staged layer by layer beside the old ones.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tetrarch.config.cli import read_keywords
from tetrarch.config.hardware import detect
from tetrarch.config.launch import plan_launch
from tetrarch.core.progress import NoProgress
from tetrarch.core.units import MIB
from tetrarch.models.build import build_model
from tetrarch.models.describe import describe
from tetrarch.models.load import load_weights
from tetrarch.models.sources import TensorSource, open_checkpoint
from tetrarch.numerics.contract import Quantization

NUM_LAYERS, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 512, 256
RAW_EXPERT = 3 * HIDDEN * INTERMEDIATE * 2  # BF16
DIGESTING = 3 * (1 << 16) * 8  # keys, products and words of the piece that is summed
SLACK = 2 * MIB  # chunks of the encoder's FP32 temporaries, and Python's own objects

# After every torch operation: memory of this process that is not a mapped file, in a process of
# its own, so that nothing freed earlier can be reused unseen.
CHILD = """
import json, os, pickle, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tetrarch.core.progress import NoProgress
from tetrarch.memory.journal import Journal
from tetrarch.models.build import build_model
from tetrarch.models.load import fill, load_weights
from tetrarch.models.placement import place
from tetrarch.models.sources import SafetensorsSource
from tetrarch.models.writer import WeightWriter

statm = os.open("/proc/self/statm", os.O_RDONLY)

def anonymous():
    _, resident, shared, *_ = map(int, os.pread(statm, 100, 0).split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")

class Watch(TorchDispatchMode):
    peak = 0
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.peak = max(self.peak, anonymous())
        return result

def load(model, source, plan):
    load_weights(model, source, plan=plan.quant, progress=NoProgress())

def reload(model, source, plan, keeps):
    writer = WeightWriter(model, plan.quant, Journal(keeps=keeps), digests=True)
    fill(writer, source, place(model, source, plan.quant), progress=NoProgress())

(small, plan), how = pickle.load(sys.stdin.buffer), sys.argv[1]
torch.set_num_threads(1)
source = SafetensorsSource(small.model.path)
warm = build_model(small)
load(warm, source, small)  # code, caches, lazy imports
reload(warm, source, small, True)
source = SafetensorsSource(plan.model.path)
before = anonymous()
model = build_model(plan)  # memory that nobody has written to is not counted
if "again" in how:
    load(model, source, plan)
    before = anonymous()
with Watch() as watch:
    if how == "hoard":
        raw = {name: tensor.clone() for name, tensor in source.read(source.headers)}
    elif "again" in how:
        reload(model, source, plan, "undo" in how)
    else:
        load(model, source, plan)
experts = [layer.weights for layer in model.experts.values()]
print(json.dumps({
    "peak": watch.peak - before,
    "final": sum(table.num_bytes for table in (model.weights, *experts)),
    "layer": experts[0].num_bytes,
}))
"""


def write_checkpoint(small: Path, folder: Path) -> Path:
    """Write 50 million expert weights in FP8 blocks; every layer and expert holds the same."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(small / "model.safetensors").items():
        for layer in range(NUM_LAYERS) if ".layers." in name else (0,):
            here = name.replace("layers.0.", f"layers.{layer}.")
            if ".experts." not in name:
                router = name.endswith("mlp.gate.weight")
                tensors[here] = value.repeat(NUM_EXPERTS // 2, 1) if router else value.clone()
            for expert in range(NUM_EXPERTS) if ".experts.0." in name else ():
                each = here.replace("experts.0.", f"experts.{expert}.")
                tensors[each] = value.to(torch.float8_e4m3fn)
                tensors[f"{each}_scale_inv"] = torch.ones([size // 128 for size in value.shape])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_local_experts": NUM_EXPERTS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def measure(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, int]]:
    """Return `measure(how)`: bytes at the peak, of the model, of one layer."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE}
    small = lab.tiny("qwen3_moe", num_hidden_layers=1, num_experts=2, **sizes)
    large = write_checkpoint(small, tmp_path_factory.mktemp("large"))
    contract = {"quantization": Quantization.NVFP4_ONLINE, "decoded_cache": False}
    plans = pickle.dumps([lab.plan(path, **contract) for path in (small, large)])

    @functools.cache
    def run(how: str) -> dict[str, int]:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, how],
            input=plans,
            stdout=subprocess.PIPE,
            check=True,
            # A large block goes back to the system as soon as it is freed.
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        )
        return json.loads(child.stdout)

    return run


def test_loading_needs_the_model_one_layer_and_one_expert(
    measure: Callable[[str], dict[str, int]],
) -> None:
    """Negative control: what a loader that reads first and quantizes later holds is above that."""
    ours = measure("load")
    limit = ours["final"] + ours["layer"] + RAW_EXPERT + SLACK
    assert ours["peak"] <= limit < measure("hoard")["peak"]


def test_an_update_stages_one_layer_beside_the_old_weights(
    measure: Callable[[str], dict[str, int]],
) -> None:
    """An undo copy adds the bytes of the slots. Negative control: what reading first holds."""
    ours = measure("again")
    limit = ours["layer"] + RAW_EXPERT + DIGESTING + SLACK
    assert ours["peak"] <= limit < measure("hoard")["peak"]
    undo = measure("again, with undo")["peak"]
    assert 0.95 * ours["final"] < undo <= ours["final"] + limit


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "nvfp4_online"])
def test_on_a_gpu_loading_needs_the_model_and_one_layer_as_stored(
    tiny_checkpoint: Any, quantization: str
) -> None:
    """Negative control: a source that is on the device as a whole."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64}
    path = tiny_checkpoint("qwen3_moe", num_hidden_layers=3, **sizes).path
    settings = {"model": str(path), "quantization": quantization, "dtype": "bfloat16"}
    plan = plan_launch(read_keywords(settings, {}), describe=describe, device=detect("cuda"))
    model = build_model(plan)
    source = open_checkpoint(plan, str(path))
    layer = sum(h.num_bytes for name, h in source.headers.items() if ".layers.0." in name)

    def peak(given: Any) -> int:
        load_weights(model, given, plan=plan.quant, progress=NoProgress())  # compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        load_weights(model, given, plan=plan.quant, progress=NoProgress())
        return torch.cuda.max_memory_allocated() - before

    assert peak(source) <= layer
    final = torch.cuda.memory_allocated()
    whole = TensorSource({name: tensor.cuda() for name, tensor in source.read(source.headers)})
    assert torch.cuda.memory_allocated() - final > 3 * layer
    del whole
