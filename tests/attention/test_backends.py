# SPDX-License-Identifier: Apache-2.0
"""The layers get what their backend computes, whichever it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tetrarch.attention.backends import BUILT, REFERENCE
from tetrarch.attention.layer import AttentionCall, PagedAttention
from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.kernels.attention.reference import ScoreRule

SITE = AttentionSite(
    index=0, name="", num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, latent=False
)
INPUTS = AttentionInputs(
    write_at=torch.arange(6),
    cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32),
    kv_lens=torch.tensor([6], dtype=torch.int32),
    page_table=torch.tensor([[0, 1]], dtype=torch.int32),
    q_lens=(6,),
    kv_lens_host=(6,),
)


class Recorder:
    """A backend that notes what is asked of it, and passes the question on."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def plan_batch(self, inputs: AttentionInputs, page_size: int) -> Recorder:
        self.asked.append(f"plan {page_size}")
        self.step = REFERENCE.plan_batch(inputs, page_size)
        return self

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        self.asked.append("write")
        self.step.write(keys, values, key, value)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
        self.asked.append("attend")
        return self.step.attend(query, keys, values, rule)

    def attend_latent(
        self, query: tuple[Tensor, Tensor], latents: Tensor, rotaries: Tensor, rule: ScoreRule
    ) -> Tensor:
        raise AssertionError("no layer here is latent")

    def per_head(self, rows: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("no layer here is latent")


def test_a_step_is_planned_once_and_asked_by_every_layer() -> None:
    torch.manual_seed(0)
    module = nn.Identity()
    pool = KVPool([SITE], 3, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    call = AttentionCall(
        torch.randn(1, 4, 6, 8), *torch.randn(2, 1, 2, 6, 8), rule=ScoreRule(scale=0.3)
    )
    recorder = Recorder()
    sites = {module: SITE}
    asked = PagedAttention(INPUTS, pool, sites=sites, tap=None, backend=recorder)
    got = [asked.attend(module, call) for _ in range(2)]
    assert recorder.asked == ["plan 4", *["write", "attend"] * 2]
    want = PagedAttention(INPUTS, pool, sites=sites, tap=None, backend=REFERENCE).attend(
        module, call
    )
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], want)


def test_what_is_built_for_a_model_is_imported_when_it_is_asked_for() -> None:
    assert set(BUILT) == {"triton"}
