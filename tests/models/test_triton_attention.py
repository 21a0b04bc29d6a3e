# SPDX-License-Identifier: Apache-2.0
"""Whole models whose attention runs in Triton compute what they compute with torch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from interpreter import repair
from tetrarch.attention.backends import BUILT
from tetrarch.attention.pool import KVPool
from tetrarch.executor.batch import page_table, place
from tetrarch.memory.slots import SlotTable
from tetrarch.models.build import Model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
paged = pytest.importorskip("tetrarch.kernels.attention.triton")

CPU = torch.device("cpu")
PAGE = 4


def logits(model: Model, q_lens: list[int], starts: list[int], pool: KVPool) -> torch.Tensor:
    """Return the logits of all rows; the ids are the positions, so that two runs agree."""
    ends = [start + count for start, count in zip(starts, q_lens, strict=True)]
    pages = [list(range(10 * row, 10 * row + -(-end // PAGE))) for row, end in enumerate(ends)]
    positions, attn = place(
        page_table(pages),
        starts=np.array(starts, np.int64),
        q_lens=q_lens,
        page_size=PAGE,
        device=CPU,
    )
    return model.forward(positions + 3, positions, attn, pool, torch.arange(sum(q_lens))).logits


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_in_triton_equals_itself_in_torch(lab: Any, family: str) -> None:
    """Prompts first, then decodes and a prompt that goes on, over the same pages."""
    model, _ = lab.load(lab.tiny(family))
    limits = paged.SplitLimits(num_seqs=3, num_units=6, span=64, num_programs=2)
    backend = BUILT["triton"].of(model.sites, limits, device=CPU, scratch=SlotTable())
    models = model, replace(model, attention=backend)
    pools = [KVPool(model.sites, 30, page_size=PAGE, dtype=model.dtype, device=CPU) for _ in models]
    for q_lens, starts in (([5, 3, 4], [0, 0, 0]), ([1, 3, 1], [5, 3, 4])):
        torch.testing.assert_close(
            *(logits(one, q_lens, starts, pool) for one, pool in zip(models, pools, strict=True)),
            rtol=1e-4,
            atol=1e-4,
        )
