# SPDX-License-Identifier: Apache-2.0
"""The numbers of a `config.json`, checked before anybody divides by them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tetrarch.config.files import field_error, names_in, object_in
from tetrarch.core.errors import CheckpointError

__all__ = ["check_sizes"]

# Every served model has these; none may be null.
_REQUIRED = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "vocab_size",
)
# Sizes of some families, by the least they may be; null leaves them to the family.
_OPTIONAL = dict.fromkeys(_REQUIRED, 1) | {
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "head_dim": 1,
    "intermediate_size": 0,
    "kv_lora_rank": 1,
    "moe_intermediate_size": 1,
    "mtp_num_hidden_layers": 0,
    "n_group": 1,
    "n_routed_experts": 1,
    "n_shared_experts": 0,
    "num_experts": 1,
    "num_key_value_heads": 1,
    "num_local_experts": 1,
    "num_mtp_modules": 0,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 1,
    "rotary_dim": 1,
    "shared_expert_intermediate_size": 0,
    "topk_group": 1,
    "v_head_dim": 1,
}
# Every layer is built before a weight is read: a slip of the hand must not take all memory.
_MOST = {"num_hidden_layers": 1000}
_MOST_OTHERS = (1 << 31) - 1
_POSITIVE = ("rms_norm_eps", "rope_theta")  # real numbers
_SECTIONS = ("quantization_config", "rope_parameters", "rope_scaling", "text_config")


def check_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Refuse sizes that are none, in `config.json` and in its `text_config`.

    A field that is absent has its family's default.

    Raises:
        CheckpointError: It names every field, its value and what it must be.
    """
    for section in _SECTIONS:
        object_in(config, section)
    names_in(config, "architectures")
    if config.get("text_config") == {}:
        raise field_error("text_config", {}, "the language model's own fields, or absent")
    wrong = [*_wrong(config, ""), *_wrong(object_in(config, "text_config"), "text_config.")]
    if wrong:
        raise CheckpointError(
            f"{path}: {', '.join(what for what, _ in wrong)}",
            why="; ".join(dict.fromkeys(why for _, why in wrong)),
            fix="correct config.json, or download it again",
        )


def _wrong(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and what it must be."""
    for name in config.keys() & _OPTIONAL.keys():
        value, least, most = config[name], _OPTIONAL[name], _MOST.get(name, _MOST_OTHERS)
        if value is None and name not in _REQUIRED:
            continue
        if type(value) is not int or not least <= value <= most:  # a boolean is an int, too
            yield (
                f"{prefix}{name} is {value!r:.60}",
                f"{name} must be a whole number from {least} to {most}",
            )
    for name in config.keys() & set(_POSITIVE):
        value = config[name]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            yield f"{prefix}{name} is {value!r:.60}", f"{name} must be a positive number"
