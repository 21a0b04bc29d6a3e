# SPDX-License-Identifier: Apache-2.0
"""How families name their drafts, and what is read of one in headers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tetrarch.config.drafts import DRAFT_COPY, draft_place, read_draft, scan_draft
from tetrarch.config.headers import TensorHeader
from tetrarch.core.errors import CheckpointError

LAYERS = 61
NAMES = {
    # DeepSeek-V3, GLM
    "model.layers.61.enorm.weight": "pre_fc_norm_embedding.weight",
    "model.layers.61.hnorm.weight": "pre_fc_norm_hidden.weight",
    "model.layers.61.eh_proj.weight": "fc.weight",
    "model.layers.61.eh_proj.weight_scale_inv": "fc.weight_scale_inv",
    "model.layers.61.shared_head.norm.weight": "norm.weight",
    "model.layers.61.shared_head.head.weight": DRAFT_COPY,
    "model.layers.61.embed_tokens.weight": DRAFT_COPY,
    "model.layers.61.self_attn.q_a_proj.weight": "layers.0.self_attn.q_a_proj.weight",
    "model.layers.61.mlp.experts.7.up_proj.weight": "layers.0.mlp.experts.7.up_proj.weight",
    "model.layers.62.enorm.weight": None,
    "model.layers.6.input_layernorm.weight": None,
    # Qwen3-Next, Qwen3.5
    "mtp.fc.weight": "fc.weight",
    "mtp.pre_fc_norm_embedding.weight": "pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight": "pre_fc_norm_hidden.weight",
    "mtp.norm.weight": "norm.weight",
    "mtp.layers.0.mlp.shared_expert_gate.weight": "layers.0.mlp.shared_expert_gate.weight",
    "mtp.layers.0.mlp.experts.gate_up_proj": "layers.0.mlp.experts.gate_up_proj",
    "mtp.layers.1.input_layernorm.weight": None,
    "mtp.embed_tokens.weight": DRAFT_COPY,
    # Nemotron-3
    "mtp.layers.0.enorm.weight": "pre_fc_norm_embedding.weight",
    "mtp.layers.0.hnorm.weight": "pre_fc_norm_hidden.weight",
    "mtp.layers.0.eh_proj.weight": "fc.weight",
    "mtp.layers.0.norm.weight": "layers.0.norm.weight",
    "mtp.layers.0.mixer.q_proj.weight": "layers.0.mixer.q_proj.weight",
    "mtp.layers.1.norm.weight": "layers.1.norm.weight",
    "mtp.layers.1.mixer.experts.3.up_proj.weight": "layers.1.mixer.experts.3.up_proj.weight",
    "mtp.layers.1.final_layernorm.weight": "norm.weight",
    # nobody's
    "model.mtp.layers.0.norm.weight": None,
    "lm_head.weight": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_names(name: str) -> None:
    assert draft_place(name, first=LAYERS) == NAMES[name]


def headers(**dtypes: str) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(name, dtype, (4,) if "norm" in name else (4, 4), 32, "f", 0)
        for name, dtype in dtypes.items()
    }


def test_a_scan_tells_experts_from_the_rest() -> None:
    expert, shared = "mtp.layers.0.mlp.experts.0.up_proj", "mtp.layers.0.mlp.shared_experts.up_proj"
    found = scan_draft(
        headers(
            **{
                f"{expert}.weight": "U8",
                f"{expert}.weight_scale": "F8_E4M3",
                f"{shared}.weight": "BF16",
                "mtp.norm.weight": "BF16",
                "mtp.embed_tokens.weight": "BF16",
                "model.norm.weight": "F32",
            }
        ),
        num_layers=2,
    )
    [(name, header)] = found.experts.items()
    assert (name, header.dtype, header.shape) == (f"{expert}.weight", "U8", (4, 4))
    assert found.linears == {"BF16"}
    assert found.layers == {"mtp.layers.0.mlp.experts"}
    assert len(found.names) == 4


def test_a_layer_too_many_is_no_draft_without_a_drafts_marks() -> None:
    block = {"model.layers.2.input_layernorm.weight": "BF16"}
    assert not scan_draft(headers(**block), num_layers=2)
    marked = {**block, "model.layers.2.eh_proj.weight": "BF16"}
    found = scan_draft(headers(**marked), num_layers=2)
    assert len(found.names) == 2
    assert not scan_draft(headers(**marked), num_layers=3)


def test_a_folder_of_mtp_tensors_alone_is_a_draft(tmp_path: Path) -> None:
    save_file({"mtp.fc.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    draft = read_draft(str(tmp_path), num_layers=4)
    assert draft.draft.names == {"mtp.fc.weight": "fc.weight"}
    assert draft.fields == {}


@pytest.mark.parametrize("make", [lambda p: p / "none", lambda p: p])
def test_no_folder_and_no_weights_are_refused(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    with pytest.raises(CheckpointError):
        read_draft(str(make(tmp_path)), num_layers=4)


def test_a_whole_checkpoint_tells_its_model(demo_path: Path) -> None:
    draft = read_draft(str(demo_path), num_layers=6)
    assert draft.fields == {"model_type": "qwen3_moe", "hidden_size": 256, "vocab_size": 1024}
    assert len(draft.draft.names) == 37
