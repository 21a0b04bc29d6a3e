# SPDX-License-Identifier: Apache-2.0
"""The registered attention function honours what it is told, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tetrarch.attention.backends import REFERENCE
from tetrarch.attention.layer import (
    CONTEXT,
    AttentionCall,
    LatentTap,
    PagedAttention,
    attention,
)
from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.core.errors import UnknownAttentionArgument

TOKENS, HEADS, GROUPS, DIM = 6, 4, 2, 8


class Recorder:
    """A context that keeps the call."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.call = call
        return call.query


def call(**arguments: Any) -> AttentionCall:
    context = Recorder()
    ones = torch.ones(1, HEADS, TOKENS, DIM)
    mask = arguments.pop("attention_mask", None)
    attention(nn.Identity(), ones, ones, ones, mask, **{CONTEXT: context, **arguments})
    return context.call


def inputs(length: int, page_size: int) -> AttentionInputs:
    return AttentionInputs(
        write_at=torch.arange(length),
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        page_table=torch.arange(-(-length // page_size), dtype=torch.int32)[None],
        q_lens=(length,),
        kv_lens_host=(length,),
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"position_bias": torch.ones(1)}, "position_bias"),
        ({"indices": torch.ones(1)}, "indices"),
        ({"is_causal": False}, "is_causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1)}, "attention_mask"),
    ],
)
def test_what_would_be_ignored_is_an_error(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(UnknownAttentionArgument, match=word):
        call(**arguments)


def test_what_is_honoured_arrives() -> None:
    sinks = torch.zeros(HEADS)
    rule = call(scaling=0.3, sliding_window=7, s_aux=sinks, is_causal=True, dropout=0.0).rule
    assert (rule.scale, rule.window, rule.sinks) == (0.3, 7, sinks)
    plain = call(softcap=None, position_ids=torch.arange(TOKENS), use_cache=False).rule
    assert (plain.scale, plain.window, plain.sinks) == (DIM**-0.5, None, None)


def test_plain_attention_equals_torch() -> None:
    torch.manual_seed(0)
    module = nn.Identity()
    site = AttentionSite(
        index=0,
        name="",
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        key_dim=DIM,
        value_dim=DIM,
        latent=False,
    )
    pool = KVPool([site], 3, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    query = torch.randn(1, HEADS, TOKENS, DIM)
    key, value = torch.randn(2, 1, GROUPS, TOKENS, DIM)
    context = PagedAttention(
        inputs(TOKENS, 4), pool, sites={module: site}, tap=None, backend=REFERENCE
    )
    got, weights = attention(module, query, key, value, None, **{CONTEXT: context})
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert weights is None
    torch.testing.assert_close(got, want.transpose(1, 2))
    assert torch.equal(pool.key(0).flatten(0, 1)[:TOKENS], key[0].transpose(0, 1))


class Latent(nn.Module):
    """The part of an MLA layer that expands latents."""

    def __init__(self, rank: int, plain: int, wide: int) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(rank, HEADS * (plain + wide), bias=False)


def test_absorbed_attention_equals_expanded_attention() -> None:
    torch.manual_seed(0)
    rank, plain, rotary, wide = 12, 6, 4, 5
    module = Latent(rank, plain, wide)
    site = AttentionSite(
        index=0,
        name="",
        num_heads=HEADS,
        num_kv_heads=1,
        key_dim=rank,
        value_dim=rotary,
        latent=True,
    )
    pool = KVPool([site], 3, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    query = torch.randn(1, HEADS, TOKENS, plain + rotary)
    latent, turned = torch.randn(1, 1, TOKENS, rank), torch.randn(1, 1, TOKENS, rotary)
    both = module.kv_b_proj(latent[0, 0]).view(TOKENS, HEADS, plain + wide).transpose(0, 1)[None]
    key = torch.cat((both[..., :plain], turned.expand(-1, HEADS, -1, -1)), -1)
    want = F.scaled_dot_product_attention(query, key, both[..., plain:], is_causal=True, scale=0.4)
    tap = LatentTap()
    context = PagedAttention(
        inputs(TOKENS, 4), pool, sites={module: site}, tap=tap, backend=REFERENCE
    )
    first = tap.update(latent, turned, 0)
    assert [part.shape[2] for part in first] == [1, 1]
    got, _ = attention(module, query, *first, None, **{CONTEXT: context, "scaling": 0.4})
    torch.testing.assert_close(got, want.transpose(1, 2))
    with pytest.raises(UnknownAttentionArgument, match="latents"):
        attention(module, query, *first, None, **{CONTEXT: context})
