# SPDX-License-Identifier: Apache-2.0
"""Compiled layers compute what the plain ones do, are compiled once a kind, and outlive reloads.

Where nothing is said, dynamo hands its graphs back as they are: any graph break raises, and
results are the plain model's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.models.build import Model
from tetrarch.models.compiled import compile_layers
from tetrarch.models.skeleton import swap_module
from tetrarch.models.sources import SafetensorsSource

KINDS = {  # what differs: dense or experts; a window or none
    "qwen3_moe": 1,
    "qwen2_moe": 1,
    "mixtral": 1,
    "olmoe": 1,
    "deepseek_v2": 2,
    "deepseek_v3": 2,
    "glm4_moe": 2,
    "glm4_moe_lite": 2,
    "gpt_oss": 2,
    "minimax_m2": 1,
}
# The others' layers are like these to the compiler.
FAMILIES = [
    family
    if family in ("qwen3_moe", "deepseek_v3", "gpt_oss")
    else pytest.param(family, marks=pytest.mark.slow)
    for family in KINDS
]
TWO = ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
SHAPES = 3  # one token, up to four, which the CPU multiplies in another way, or more
PAGE = 8


def steps(model: Model, *, draft: bool = False) -> list[Tensor]:
    """Logits of two sequences: a prompt, a token, both together, and two more counts of rows."""
    pool = KVPool(model.sites, 8, page_size=PAGE, dtype=model.dtype, device=model.device)
    generator = torch.Generator().manual_seed(0)
    done, found = [0, 0], []
    for counts in ((9, 0), (1, 0), (3, 5), (0, 1), (1, 1), (2, 14)):
        write_at: list[int] = []
        positions: list[int] = []
        for seq, count in enumerate(counts):
            span = range(done[seq], done[seq] + count)
            positions += span
            write_at += [4 * PAGE * seq + p for p in span]
            done[seq] += count
        live = [seq for seq in (0, 1) if counts[seq]]
        lens = [counts[seq] for seq in live]
        inputs = AttentionInputs(
            write_at=torch.tensor(write_at),
            cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int(),
            kv_lens=torch.tensor([done[seq] for seq in live], dtype=torch.int32),
            page_table=torch.tensor([range(4 * s, 4 * s + 4) for s in live], dtype=torch.int32),
            q_lens=tuple(lens),
            kv_lens_host=tuple(done[seq] for seq in live),
        )
        ids = torch.randint(3, 256, (sum(counts),), generator=generator)
        rest = torch.tensor(positions), inputs, pool, torch.arange(len(ids))
        with torch.inference_mode():
            if draft:
                width = model.hf.config.hidden_size
                hidden = torch.randn(len(ids), width, generator=generator).to(model.dtype)
                found.append(model.draft_forward(ids, hidden, *rest).logits.float())
            else:
                found.append(model.forward(ids, *rest).logits.float())
    return found


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def compiled(model: Model, backend: str = "eager") -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend(backend)
    compile_layers(model, backend=counter)
    return counter


@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_of_layer_is_compiled_once_and_computes_the_same(lab: Any, family: str) -> None:
    model, _ = lab.load(lab.tiny(family))
    want = steps(model)
    counter = compiled(model)
    assert equal(steps(model), want)
    assert counter.frame_count == SHAPES * KINDS[family]
    assert len(model.hf.base_model.get_submodule("layers")) > KINDS[family]


@pytest.mark.parametrize("family", TWO)
def test_operators_hide_nothing_from_functionalization(lab: Any, family: str) -> None:
    model, _ = lab.load(lab.tiny(family), dtype="bfloat16")
    want = steps(model)
    compiled(model, "aot_eager")
    assert equal(steps(model), want)


@pytest.mark.parametrize("family", TWO)
def test_a_reload_in_place_needs_no_new_compilation(lab: Any, family: str) -> None:
    first, second = lab.tiny(family), lab.tiny(family, seed=1)
    plain, _ = lab.load(second)
    model, _ = lab.load(first)
    counter = compiled(model)
    before = steps(model)
    lab.fill(model, SafetensorsSource(second), lab.plan(second))
    assert equal(after := steps(model), steps(plain))
    assert not equal(after, before)
    assert counter.frame_count == SHAPES * KINDS[family]


def test_models_of_one_process_do_not_share_what_they_hide(lab: Any) -> None:
    paths = [lab.tiny("qwen3_moe", seed=seed) for seed in (0, 1)]
    models = [lab.load(path)[0] for path in paths]
    want = [steps(model) for model in models]
    for model in models:
        compiled(model)
    for _ in range(2):
        assert all(equal(steps(model), one) for model, one in zip(models, want, strict=True))


def test_a_draft_is_compiled_with_its_target(
    lab: Any, drafted_checkpoint: Callable[..., Path], start_rank: Callable[..., Any]
) -> None:
    """Its block is a layer of the target's kind, and takes part in its compilation."""
    rank = start_rank(
        drafted_checkpoint("qwen3_moe"), speculative_algorithm="mtp", quantization="none"
    )
    model: Model = rank._model
    want = [*steps(model), *steps(model, draft=True)]
    counter = compiled(model)
    assert equal([*steps(model), *steps(model, draft=True)], want)
    assert counter.frame_count == SHAPES


def test_a_layer_that_cannot_be_compiled_in_one_piece_raises(lab: Any) -> None:
    model, _ = lab.load(lab.tiny("qwen3_moe"))

    class Peeking(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden if hidden.sum().item() > 0 else -hidden

    swap_module(model.hf, "model.layers.1.input_layernorm", Peeking())
    steps(model)
    compiled(model)
    with pytest.raises(Exception, match=r"graph|Unsupported|data-dependent"):
        steps(model)


@pytest.mark.slow
def test_the_compiler_that_serves_computes_it_up_to_rounding(lab: Any) -> None:
    model, _ = lab.load(lab.tiny("qwen3_moe"))
    want = steps(model)
    compile_layers(model)
    for got, expected in zip(steps(model), want, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
