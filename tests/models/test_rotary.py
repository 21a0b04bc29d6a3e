# SPDX-License-Identifier: Apache-2.0
"""A rotary embedding is looked up where that gives the same bits, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tetrarch.config.plan import Plan
from tetrarch.models.build import build_model
from tetrarch.models.rotary import RotaryTable, tabulate_rotary

CPU = torch.device("cpu")


class Theirs(nn.Module):
    """An embedding as transformers writes it."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * torch.logspace(0, -4, 32)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class OfTheLongest(Theirs):
    """Its rows depend on the other rows: no table holds them."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids)
        return cos * position_ids.amax(), sin


class AsksForMore(Theirs):
    def forward(self, x: Tensor, position_ids: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
        return super().forward(x, position_ids)


def tabulated(rotary: nn.Module, num_positions: int = 64) -> nn.Module:
    model = nn.ModuleDict({"rotary_emb": rotary})
    tabulate_rotary(model, num_positions=num_positions, dtype=torch.bfloat16, device=CPU)
    return model["rotary_emb"]


def test_the_table_gives_the_rows_of_any_positions() -> None:
    ours = tabulated(Theirs())
    assert isinstance(ours, RotaryTable)
    rows = torch.empty(0, dtype=torch.bfloat16)
    for positions in ([[0]], [[63]], [[5, 5, 0, 62]], [list(range(64))]):
        at = torch.tensor(positions)
        assert all(map(torch.equal, ours(rows, at), Theirs()(rows, at)))


def test_what_no_table_holds_is_computed() -> None:
    assert isinstance(tabulated(OfTheLongest()), OfTheLongest)
    assert isinstance(tabulated(AsksForMore()), AsksForMore)
    assert isinstance(tabulated(Theirs(), num_positions=1 << 20), Theirs)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2"],
)
def test_families_have_tables_with_the_same_bits(
    tiny_checkpoint: Callable[..., Any], make_plan: Callable[..., Plan], family: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    for dtype in ("float32", "bfloat16"):
        plan = make_plan(checkpoint.path, dtype=dtype)
        model = build_model(plan)
        ours = model.hf.base_model.get_submodule("rotary_emb")
        assert isinstance(ours, RotaryTable)
        rows = torch.empty(0, dtype=model.dtype)
        positions = torch.tensor([[0, 1, 7, 40, plan.model.context_len - 1]])
        found, theirs = (
            each(rows, positions) for each in (ours, checkpoint.reference.base_model.rotary_emb)
        )
        pairs = zip(found, theirs, strict=True) if isinstance(found, tuple) else [(found, theirs)]
        assert all(torch.equal(*pair) for pair in pairs)
