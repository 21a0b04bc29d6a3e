# SPDX-License-Identifier: Apache-2.0
"""A deterministic model passes with Triton's kernels too, and computes what it computes without.

That bits do not move is tested on a GPU (tests/executor/test_deterministic_gpu.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from interpreter import repair
from tetrarch.attention.backends import BUILT, ROW_INVARIANT
from tetrarch.config.support import SUPPORT
from tetrarch.core.registry import Registry
from tetrarch.memory.slots import SlotTable
from tetrarch.models import row_invariant

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
paged = pytest.importorskip("tetrarch.kernels.attention.triton")

TRITON = next(row for row in SUPPORT if row.runner == "triton" and row.activations == "bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_nothing_that_a_gpu_runs_is_refused(
    lab: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sums are Triton's as well: the tiny models' are all shorter than a GPU's long ones."""
    model, _ = lab.load(lab.tiny(family))
    model = replace(model, deterministic=True, attention=ROW_INVARIANT)
    want = lab.logits(model)
    products = Registry({"cpu": "tetrarch.kernels.matmul.triton:multiply"})
    sums = Registry({"cpu": "tetrarch.kernels.pointwise.triton:row_sum"})
    monkeypatch.setattr(row_invariant, "_PRODUCTS", products)
    monkeypatch.setattr(row_invariant, "_ROW_SUMS", sums)
    monkeypatch.setattr(row_invariant, "_LONGEST_SUM_ON_GPU", 1)
    limits = paged.SplitLimits(num_seqs=3, num_units=6, span=64, num_programs=2, exact_prompts=True)
    backend = BUILT["triton"].of(
        model.sites, limits, device=torch.device("cpu"), scratch=SlotTable()
    )
    got = lab.logits(replace(model, attention=backend))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
