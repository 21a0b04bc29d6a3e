# SPDX-License-Identifier: Apache-2.0
"""Models loaded from checkpoints in every stored form, and the Hugging Face model beside them."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.config.plan import Plan
from tetrarch.core.progress import NoProgress
from tetrarch.models.build import Model, build_model
from tetrarch.models.load import load_weights
from tetrarch.models.report import LoadReport
from tetrarch.models.sources import SafetensorsSource, Source

TOKENS = (7, 201, 33, 90, 5, 5, 164, 18, 250, 77, 61)

# Multiples of 16, not of 128: the second FP8 block of each axis is ragged. Four experts.
RAGGED: dict[str, dict[str, int]] = {
    "qwen3_moe": {"moe_intermediate_size": 160, "num_experts": 4},
    "deepseek_v3": {"moe_intermediate_size": 160, "n_routed_experts": 4},
    "minimax_m2": {"intermediate_size": 160, "num_local_experts": 4},
}


class Lab:
    """What the tests of loading share. Checkpoints and plans are made once, models each time."""

    def __init__(
        self,
        quantizer: ModuleType,
        tiny_checkpoint: Callable[..., Any],
        make_plan: Callable[..., Plan],
        new_folder: Callable[[], Path],
    ) -> None:
        self._quantizer, self._tiny, self._new_folder = quantizer, tiny_checkpoint, new_folder
        self.plan = make_plan
        self.experts: Callable[[str], bool] = quantizer.EXPERTS
        self.linears: Callable[[str], bool] = quantizer.LINEARS

    def tiny(self, family: str, **overrides: object) -> Path:
        """The folder of a tiny random checkpoint in FP32."""
        return self._tiny(family, **overrides).path

    def ragged(self, family: str) -> Path:
        """One whose matrices do not divide into FP8 blocks; two layers."""
        return self.tiny(family, hidden_size=144, num_hidden_layers=2, **RAGGED[family])

    def store(
        self, path: Path, form: str, which: Callable[[str], bool] | None = None
    ) -> tuple[Path, dict[str, Tensor]]:
        """Write a checkpoint in another form; return its folder and the values it decodes to."""
        out = self._new_folder() / form
        values = self._quantizer.quantize_checkpoint(path, out, form, which=which or self.linears)
        return out, values

    def load(self, path: Path, **contract: Any) -> tuple[Model, LoadReport]:
        """Build a plan's model and load it from the plan's folder."""
        plan = self.plan(path, **contract)
        model = build_model(plan)
        return model, self.fill(model, SafetensorsSource(path), plan)

    def fill(self, model: Model, source: Source, plan: Plan) -> LoadReport:
        """Load a model that is there."""
        return load_weights(model, source, plan=plan.quant, progress=NoProgress())

    def logits(self, model: Model) -> Tensor:
        """All logits of a fixed prompt: (T, V)."""
        pool = KVPool(model.sites, 1, page_size=16, dtype=model.dtype, device=model.device)
        count = len(TOKENS)
        rows = torch.arange(count)
        inputs = AttentionInputs(
            write_at=rows,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=torch.tensor([count], dtype=torch.int32),
            page_table=torch.zeros(1, 1, dtype=torch.int32),
            q_lens=(count,),
            kv_lens_host=(count,),
        )
        return model.forward(torch.tensor(TOKENS), rows, inputs, pool, rows).logits.float()

    def reference(self, path: Path, values: dict[str, Tensor] | None = None) -> Tensor:
        """Hugging Face's FP32 logits of the same prompt, of the folder's or of other values."""
        plain = self._new_folder()
        config = json.loads((path / "config.json").read_text())
        config.pop("quantization_config", None)
        (plain / "config.json").write_text(json.dumps(config))
        values = values or load_file(path / "model.safetensors")
        floats = {name: value.float().contiguous() for name, value in values.items()}
        save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager"
        )
        model.set_experts_implementation("eager")
        with torch.no_grad():
            return model(torch.tensor([TOKENS])).logits[0]

    def bits(self, model: Model) -> dict[str, bytes]:
        """Every byte of a model's weights, by slot: to show that nothing, or something, changed."""
        layers = ((path, layer.weights) for path, layer in model.experts.items())
        return {
            f"{path}/{name}": slot.reshape(-1).view(torch.uint8).numpy().tobytes()
            for path, table in itertools.chain([("", model.weights)], layers)
            for name, slot in table.items()
        }


@pytest.fixture(scope="session")
def lab(
    tiny_checkpoint: Callable[..., Any],
    make_plan: Callable[..., Plan],
    tmp_path_factory: pytest.TempPathFactory,
) -> Lab:
    """Checkpoints, models and their reference."""
    path = Path(__file__).parents[2] / "tools" / "quantize_checkpoint.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    quantizer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quantizer)
    return Lab(quantizer, tiny_checkpoint, make_plan, lambda: tmp_path_factory.mktemp("stored"))
