# SPDX-License-Identifier: Apache-2.0
"""A size that is none is refused at the door, by its name, before anybody divides by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.sizes import check_sizes
from tetrarch.core.errors import CheckpointError, TetrarchError
from tetrarch.models.describe import describe

PATH = Path("config.json")
FROM_ONE = (
    "hidden_size", "max_position_embeddings", "num_attention_heads", "num_experts_per_tok",
    "num_hidden_layers", "vocab_size", "decoder_sparse_step", "head_dim", "kv_lora_rank",
    "moe_intermediate_size", "n_group", "n_routed_experts", "num_experts", "num_key_value_heads",
    "num_local_experts", "q_lora_rank", "qk_rope_head_dim", "rotary_dim", "topk_group",
    "v_head_dim",
)  # fmt: skip
FROM_ZERO = (
    "first_k_dense_replace", "intermediate_size", "mtp_num_hidden_layers", "n_shared_experts",
    "num_mtp_modules", "num_nextn_predict_layers", "qk_nope_head_dim",
    "shared_expert_intermediate_size",
)  # fmt: skip


@pytest.mark.parametrize("name", [*FROM_ONE, *FROM_ZERO])
@pytest.mark.parametrize("value", [0, -1, 2.0, "64", True, [64], {"a": 1}, 1 << 31])
def test_a_wrong_size_is_named_with_its_value(name: str, value: object) -> None:
    if value == 0 and name in FROM_ZERO:
        check_sizes({name: value}, PATH)
        return
    with pytest.raises(CheckpointError) as caught:
        check_sizes({name: value}, PATH)
    assert f"{name} is {value!r}" in caught.value.what
    assert f"{name} must be a whole number from" in caught.value.why
    with pytest.raises(CheckpointError, match=f"text_config.{name}"):
        check_sizes({"text_config": {name: value}}, PATH)


def test_null_is_for_fields_that_a_family_may_lack() -> None:
    check_sizes({"head_dim": None, "q_lora_rank": None, "n_shared_experts": None}, PATH)
    for name in FROM_ONE[:6]:
        with pytest.raises(CheckpointError, match=f"{name} is None"):
            check_sizes({name: None}, PATH)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1.0, "1e-6", None, True, float("nan"), float("inf")])
def test_a_factor_is_a_positive_number(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is"):
        check_sizes({name: value}, PATH)
    check_sizes({name: 10000}, PATH)


def test_all_wrong_sizes_are_named_together() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_sizes({"hidden_size": 0, "vocab_size": "x", "head_dim": -1}, PATH)
    assert all(name in caught.value.what for name in ("hidden_size", "vocab_size", "head_dim"))


@pytest.mark.parametrize("value", ["x", 5, [1]])
@pytest.mark.parametrize(
    "name", ["text_config", "quantization_config", "rope_parameters", "rope_scaling"]
)
def test_a_section_is_an_object(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=name):
        check_sizes({name: value}, PATH)


VALUES: tuple[Any, ...] = (None, 0, -1, 1.5, "x", True, [], {}, [None], 1 << 70)


@pytest.fixture(scope="session")
def demo_config(demo_path: Path) -> dict[str, Any]:
    return json.loads((demo_path / "config.json").read_text())


def test_no_field_of_any_kind_ends_in_a_traceback(
    demo_config: dict[str, Any], tmp_path: Path
) -> None:
    """Every field of the demo model's configuration, and some it lacks, given every wrong value."""
    names = [*demo_config, "layer_types", "rope_scaling", "quantization_config", "text_config"]
    outcomes: dict[bool, int] = {True: 0, False: 0}
    for name in names:
        for value in VALUES:
            (tmp_path / "config.json").write_text(json.dumps(demo_config | {name: value}))
            try:
                described = describe(read_checkpoint(str(tmp_path)).path)
            except TetrarchError:
                outcomes[False] += 1
            else:
                assert described.context_len > 0, name
                outcomes[True] += 1
    assert outcomes[False] > 150
