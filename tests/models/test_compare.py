# SPDX-License-Identifier: Apache-2.0
"""New weights must belong to the model that is running; the configuration tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tetrarch.core.errors import CheckpointError
from tetrarch.models.build import Model
from tetrarch.models.compare import check_same_model


@pytest.fixture(scope="module")
def served(lab: Any) -> tuple[Model, Mapping[str, Any]]:
    path = lab.tiny("qwen3_moe")
    return lab.load(path)[0], json.loads((path / "config.json").read_text())


def folder_with(config: Mapping[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 0.5),
        ("hidden_size", 128),
        ("num_attention_heads", 2),
        ("num_experts_per_tok", 1),
        ("norm_topk_prob", False),
        ("num_hidden_layers", 2),
        ("vocab_size", 300),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
    ],
)
def test_what_a_forward_depends_on_is_named_with_both_values(
    served: Any, tmp_path: Path, key: str, value: object
) -> None:
    model, config = served
    assert config.get(key) != value
    with pytest.raises(CheckpointError, match="another model") as refused:
        check_same_model(model, folder_with({**config, key: value}, tmp_path))
    assert key in refused.value.why
    assert repr(value) in refused.value.why


def test_rotary_parameters_count(served: Any, tmp_path: Path) -> None:
    model, config = served
    rope = {"rope_type": "default", "rope_theta": 123.0}
    changed = {**config, "rope_parameters": rope}
    with pytest.raises(CheckpointError, match="another model") as refused:
        check_same_model(model, folder_with(changed, tmp_path))
    assert "rope_theta" in refused.value.why


def test_another_family_is_refused(served: Any, lab: Any) -> None:
    with pytest.raises(CheckpointError, match="another model") as refused:
        check_same_model(served[0], str(lab.tiny("mixtral")))
    assert "model_type" in refused.value.why or "differs" in refused.value.why


def test_what_describes_files_and_producers_does_not_count(served: Any, tmp_path: Path) -> None:
    model, config = served
    own = {
        "transformers_version": "9.9",
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "_name_or_path": "elsewhere",
        "eos_token_id": 7,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    check_same_model(model, folder_with({**config, **own}, tmp_path))
    check_same_model(model, folder_with(config, tmp_path))


def test_a_folder_without_a_configuration_is_refused(served: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read the model configuration"):
        check_same_model(served[0], str(tmp_path))
