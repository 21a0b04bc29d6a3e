# SPDX-License-Identifier: Apache-2.0
"""What paged attention needs to know: T tokens, R sequences, P pages of the longest one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionInputs", "AttentionSite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """One step: sequence r owns query rows `cu_seqlens_q[r]` to `cu_seqlens_q[r + 1]`.

    They are the last `q_lens[r]` positions of its `kv_lens[r]` keys, in step order.
    """

    write_at: Tensor  # (T,) int64, flat slot in the pool: page * page_size + offset
    cu_seqlens_q: Tensor  # (R + 1,) int32
    kv_lens: Tensor  # (R,) int32, length after this step
    page_table: Tensor  # (R, P) int32; entries past a sequence's last page are 0
    q_lens: tuple[int, ...]  # host copy, so that no kernel launch waits for the device
    kv_lens_host: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One attention layer: what its pages hold, keys and values, or of MLA latent and rotary."""

    index: int  # position among the attention layers
    name: str  # the HF module's path
    num_heads: int  # of queries
    num_kv_heads: int  # 1 for MLA
    key_dim: int
    value_dim: int
    latent: bool  # MLA
