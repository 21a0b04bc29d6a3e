# SPDX-License-Identifier: Apache-2.0
"""The pool holds what its sites say, at addresses that stay."""

from __future__ import annotations

import torch

from tetrarch.attention.pool import KVPool, bytes_per_token
from tetrarch.attention.types import AttentionSite

SITES = (
    AttentionSite(
        index=0, name="a", num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, latent=False
    ),
    AttentionSite(
        index=1, name="b", num_heads=4, num_kv_heads=1, key_dim=32, value_dim=8, latent=True
    ),
)


def test_a_token_costs_what_its_layers_keep() -> None:
    per_token = bytes_per_token(SITES, torch.bfloat16)
    assert per_token == 2 * (2 * 16 + 2 * 16 + 32 + 8)
    pool = KVPool(SITES, 5, page_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert pool.num_tokens == 20
    assert pool.slots.num_bytes == 20 * per_token


def test_each_layer_has_its_own_pages() -> None:
    pool = KVPool(SITES, 5, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.key(0).shape == pool.value(0).shape == (5, 4, 2, 16)
    assert pool.key(1).shape == (5, 4, 1, 32)
    assert pool.value(1).shape == (5, 4, 1, 8)
    places = {tensor.data_ptr() for i in (0, 1) for tensor in (pool.key(i), pool.value(i))}
    assert places == set(pool.slots.addresses().values())
