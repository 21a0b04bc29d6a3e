# SPDX-License-Identifier: Apache-2.0
"""Facts are what Hugging Face's own model says; what we cannot serve is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from tetrarch.core.errors import CheckpointError
from tetrarch.models.describe import describe

HYBRID = {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2}


def test_counts_are_those_of_the_real_model(
    tiny: ModuleType, tiny_checkpoint: Callable[..., object]
) -> None:
    for family in tiny.FAMILIES:
        checkpoint = tiny_checkpoint(family)
        model = checkpoint.reference
        experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        facts = describe(str(checkpoint.path))
        assert facts.model_type == family
        assert facts.num_dense_params + facts.num_expert_params == model.num_parameters()
        assert facts.num_expert_params == experts
        assert (facts.num_experts, facts.top_k) == (8, 2)
        assert (facts.expert_hidden_size, facts.expert_intermediate_size) == (64, 32)
        assert (facts.hidden_size, facts.vocab_size, facts.context_len) == (64, 256, 512)


@pytest.mark.parametrize(
    ("family", "moe_layers", "kv_elements"),
    [
        ("qwen3_moe", 4, 4 * 2 * (16 + 16)),
        ("gpt_oss", 4, 4 * 2 * (16 + 16)),
        ("deepseek_v3", 3, 4 * (16 + 8)),  # one latent and one rotary key, not 4 heads
    ],
)
def test_layers_and_cache_sizes(
    family: str, moe_layers: int, kv_elements: int, tiny_checkpoint: Callable[..., object]
) -> None:
    facts = describe(str(tiny_checkpoint(family).path))
    assert (facts.num_layers, facts.num_moe_layers) == (4, moe_layers)
    assert facts.kv_elements_per_token == kv_elements


def test_the_demo_model_has_one_draft_layer(demo_path: Path) -> None:
    facts = describe(str(demo_path))
    assert facts.num_mtp_layers == 1
    assert facts.num_dense_params + facts.num_expert_params == 6438912
    assert facts.num_draft_expert_params == 8 * 3 * 256 * 128
    assert facts.num_draft_dense_params == 331136  # all that its mtp.* tensors hold besides
    assert facts.draft_kv_elements_per_token * 6 == facts.kv_elements_per_token
    assert facts.architectures == ("Qwen3MoeForCausalLM",)


def test_tied_embeddings_count_once(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.tiny_config("qwen3_moe").save_pretrained(tmp_path / "two")
    tiny.tiny_config("qwen3_moe", tie_word_embeddings=True).save_pretrained(tmp_path / "one")
    two, one = describe(str(tmp_path / "two")), describe(str(tmp_path / "one"))
    assert two.num_dense_params - one.num_dense_params == 256 * 64


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "moe"]}, "linear"),
        ("qwen3_next", {"num_hidden_layers": 4, **HYBRID}, "linear_attention"),
        ("qwen3_5_moe_text", {"num_hidden_layers": 4, **HYBRID}, "linear_attention"),
        ("llama4_text", {"num_hidden_layers": 4}, "chunked_attention"),
        ("deepseek_v32", {"num_hidden_layers": 4}, "indexed|sparse"),
        ("jetmoe", {"num_hidden_layers": 2}, "no expert layers"),
        ("llama", {"num_hidden_layers": 2}, "no expert layers"),
        ("jamba", {"num_hidden_layers": 4, "attn_layer_offset": 1}, "forward without data failed"),
        (
            "qwen3_moe",
            {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary embedding is dynamic",
        ),
        ("qwen3_moe", {"num_hidden_layers": 2, "hidden_act": "gelu"}, "none of SwiGLU"),
    ],
)
def test_what_we_cannot_serve_is_refused_by_name(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=reason) as caught:
        describe(str(tmp_path))
    assert model_type in str(caught.value) or "Qwen3MoeExperts" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [None, {"model_type": "never_heard_of"}, {}, {"model_type": "qwen3_moe", "hidden_size": "64"}],
)
def test_an_unreadable_configuration_names_the_folder(
    content: dict[str, str] | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        describe(str(tmp_path))


def test_a_model_that_uses_no_expert_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.tiny_config("qwen3_moe", num_experts_per_tok=0).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no token would reach an expert"):
        describe(str(tmp_path))
