# SPDX-License-Identifier: Apache-2.0
"""How much memory a model takes, counted from its facts before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from tetrarch.config.plan import ModelFacts
from tetrarch.numerics.contract import QuantContract

__all__ = ["MemoryEstimate", "dtype_bytes", "estimate_memory"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BITS_PER_NVFP4 = 4 + 8 / 16  # a code, and its share of one E4M3 scale per 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes by kind, on all ranks together.

    Attributes:
        experts: Expert weights as the contract keeps them; layers that `--fp4-ignored-layers`
            names are counted as if they were quantized.
        decoded_experts: The same weights decoded, where a cache of them is kept.
        unquantized_experts: What the experts would take without quantization.
        kv_per_token: One token of every attention layer.
    """

    dense: int
    experts: int
    decoded_experts: int
    unquantized_experts: int
    kv_per_token: int


def dtype_bytes(dtype: str) -> int:
    """Return the size of one element."""
    return _BYTES[dtype]


def estimate_memory(
    facts: ModelFacts,
    contract: QuantContract,
    *,
    dtype: str,
    decoded_cache: bool,
    draft: QuantContract | None = None,
) -> MemoryEstimate:
    """Count the bytes of a model under a contract, and of its draft under the draft's, if any."""
    size = dtype_bytes(dtype)
    dense, kv = facts.num_dense_params, facts.kv_elements_per_token
    groups = [(facts.num_expert_params, contract)]
    if draft is not None:
        dense += facts.num_draft_dense_params
        kv += facts.draft_kv_elements_per_token
        groups.append((facts.num_draft_expert_params, draft))
    packed = sum(count for count, each in groups if each.quantizes_weights)
    plain = sum(count for count, each in groups if not each.quantizes_weights)
    return MemoryEstimate(
        dense=dense * size,
        experts=int(packed * _BITS_PER_NVFP4 / 8) + plain * size,
        decoded_experts=packed * size if decoded_cache else 0,
        unquantized_experts=(packed + plain) * size,
        kv_per_token=kv * size,
    )
