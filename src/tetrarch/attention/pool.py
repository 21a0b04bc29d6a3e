# SPDX-License-Identifier: Apache-2.0
"""Paged keys and values: one pair of tensors a layer, allocated once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tetrarch.attention.types import AttentionSite
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena
from tetrarch.memory.slots import SlotTable

__all__ = ["KVPool", "bytes_per_token"]


def bytes_per_token(sites: Sequence[AttentionSite], dtype: torch.dtype) -> int:
    """Return what one token takes in the pool, all layers together."""
    numbers = sum(site.num_kv_heads * (site.key_dim + site.value_dim) for site in sites)
    return numbers * dtype.itemsize


class KVPool:
    """The pages of every attention layer.

    A page id means the same `page_size` positions in every layer. A page holds what its owner
    wrote; nobody clears it when it is freed.

    Args:
        sites: The model's attention layers (`Model.sites`).
        num_pages: Pages in each layer.
        page_size: Tokens in a page.
        dtype: Of keys and values.
        device: Where the pool lives.
        arena: Its memory there, if it is to be released and resumed.
    """

    def __init__(
        self,
        sites: Sequence[AttentionSite],
        num_pages: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        arena: Arena | None = None,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.slots = SlotTable(arena)
        for site in sites:
            for kind, dim in (("key", site.key_dim), ("value", site.value_dim)):
                shape = (num_pages, page_size, site.num_kv_heads, dim)
                self.slots.allocate(f"{site.index}.{kind}", TensorSpec(shape, dtype, device))
        self._keys = [self.slots[f"{site.index}.key"] for site in sites]
        self._values = [self.slots[f"{site.index}.value"] for site in sites]

    def key(self, index: int) -> Tensor:
        """Return a layer's keys (or MLA latents): (num_pages, page_size, heads, key_dim)."""
        return self._keys[index]

    def value(self, index: int) -> Tensor:
        """Return a layer's values (or MLA rotary keys), shaped as `key` with value_dim."""
        return self._values[index]

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size
