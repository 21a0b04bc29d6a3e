# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention runs in Triton get what the reference computes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from interpreter import repair
from tetrarch.attention.backends import BUILT, REFERENCE
from tetrarch.attention.layer import AttentionCall, LatentTap, PagedAttention
from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.kernels.attention.reference import ScoreRule
from tetrarch.memory.slots import SlotTable

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
paged = pytest.importorskip("tetrarch.kernels.attention.triton")

CPU = torch.device("cpu")
HEADS = 4
SITES = (
    AttentionSite(
        index=0, name="", num_heads=HEADS, num_kv_heads=2, key_dim=16, value_dim=16, latent=False
    ),
    AttentionSite(
        index=1, name="", num_heads=HEADS, num_kv_heads=1, key_dim=24, value_dim=8, latent=True
    ),
)


class Latent(nn.Module):
    """The part of an MLA layer that expands latents: 12 plain numbers a key, 10 a value."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(24, HEADS * 22, bias=False)


def inputs() -> AttentionInputs:
    return AttentionInputs(
        write_at=torch.tensor([8, 9, 10, 11, 12, 27]),
        cu_seqlens_q=torch.tensor([0, 5, 6], dtype=torch.int32),
        kv_lens=torch.tensor([5, 20], dtype=torch.int32),
        page_table=torch.tensor([[1, 0, 0], [5, 4, 3]], dtype=torch.int32),
        q_lens=(5, 1),
        kv_lens_host=(5, 20),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU")
@pytest.mark.parametrize("site", SITES, ids=["plain", "latent"])
@torch.no_grad()
def test_a_layer_equals_the_reference(site: AttentionSite) -> None:
    torch.manual_seed(0)
    module = Latent()
    limits = paged.SplitLimits(num_seqs=2, num_units=4, span=64, num_programs=2)
    triton = BUILT["triton"].of(SITES, limits, device=CPU, scratch=SlotTable())
    step = inputs()
    pools = [KVPool(SITES, 6, page_size=8, dtype=torch.float32, device=CPU) for _ in range(2)]
    for pool in pools:
        for part in (pool.key(site.index), pool.value(site.index)):
            generator = torch.Generator().manual_seed(1)
            part.copy_(torch.randn(part.shape, generator=generator))
    dim = 20 if site.latent else 16
    query = torch.randn(1, HEADS, 6, dim)
    new = [torch.randn(1, site.num_kv_heads, 6, d) for d in (site.key_dim, site.value_dim)]
    got = []
    for pool, backend in zip(pools, (triton, REFERENCE), strict=True):
        tap = LatentTap() if site.latent else None
        if tap is not None:
            tap.update(*new, 0)
        context = PagedAttention(step, pool, sites={module: site}, tap=tap, backend=backend)
        call = AttentionCall(query, *new, rule=ScoreRule(scale=0.3))
        got.append(context.attend(module, call))
    torch.testing.assert_close(*got, rtol=1e-5, atol=1e-5)
