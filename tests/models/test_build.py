# SPDX-License-Identifier: Apache-2.0
"""A built model keeps its addresses, and nothing that another model could see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.config.plan import Plan
from tetrarch.core.errors import UnknownAttentionArgument
from tetrarch.models.build import Model, build_model
from tetrarch.numerics.contract import Quantization

MakePlan = Callable[..., Plan]
TinyCheckpoint = Callable[..., object]


def fill(model: Model, reference: nn.Module) -> None:
    """Copy the dense weights of a Hugging Face model; the experts say nothing."""
    state = reference.state_dict()
    for name, slot in model.weights.items():
        slot.copy_(state[name])
    for layer in model.experts.values():
        for slot in layer.weights.values():
            slot.zero_()


def one_prompt(length: int, page_size: int) -> AttentionInputs:
    """One sequence of `length` new tokens on pages 0, 1, …."""
    return AttentionInputs(
        write_at=torch.arange(length),
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        page_table=torch.arange(-(-length // page_size), dtype=torch.int32)[None],
        q_lens=(length,),
        kv_lens_host=(length,),
    )


def logits(model: Model, ids: Tensor, rows: Tensor) -> Tensor:
    pool = KVPool(model.sites, 8, page_size=4, dtype=model.dtype, device=model.device)
    positions = torch.arange(len(ids))
    return model.forward(ids, positions, one_prompt(len(ids), 4), pool, rows).logits


def test_a_write_to_a_slot_is_seen_by_the_forward(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    checkpoint = tiny_checkpoint("qwen3_moe")
    model = build_model(make_plan(checkpoint.path))
    fill(model, checkpoint.reference)
    ids, rows = torch.arange(3, 12), torch.tensor([8])
    before = logits(model, ids, rows)
    model.weights.write_("lm_head.weight", 2 * model.weights["lm_head.weight"])
    assert torch.equal(logits(model, ids, rows), 2 * before)


def test_only_the_rows_asked_for_get_logits(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    checkpoint = tiny_checkpoint("mixtral")
    model = build_model(make_plan(checkpoint.path))
    fill(model, checkpoint.reference)
    ids = torch.arange(3, 13)
    every = logits(model, ids, torch.arange(10))
    some = logits(model, ids, torch.tensor([7, 2]))
    assert every.shape == (10, 256)
    torch.testing.assert_close(some, every[[7, 2]], atol=1e-6, rtol=0)
    assert logits(model, ids, torch.tensor([], dtype=torch.int64)).shape == (0, 256)


def test_two_models_take_turns_without_seeing_each_other(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    models = []
    for family in ("qwen3_moe", "deepseek_v3"):
        checkpoint = tiny_checkpoint(family)
        models.append(build_model(make_plan(checkpoint.path)))
        fill(models[-1], checkpoint.reference)
    ids, rows = torch.arange(3, 12), torch.tensor([8])
    alone = [logits(model, ids, rows) for model in models]
    for model, want in zip([*models, *models[::-1]], [*alone, *alone[::-1]], strict=True):
        assert torch.equal(logits(model, ids, rows), want)


def test_an_argument_that_appears_later_is_an_error(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    model = build_model(make_plan(tiny_checkpoint("qwen3_moe").path))
    with pytest.raises(UnknownAttentionArgument, match="softcap"):
        model.hf(input_ids=torch.ones(1, 2, dtype=torch.long), softcap=30.0, use_cache=False)


@pytest.mark.parametrize(
    "pattern", ["model.layers.1", "model.layers.1.block_sparse_moe", "*layers.1.mlp*"]
)
def test_an_ignored_layer_is_named_as_the_checkpoint_or_as_transformers_does(
    pattern: str, tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    path: Path = tiny_checkpoint("mixtral").path
    online = {"quantization": Quantization.NVFP4_ONLINE, "ignored_layers": (pattern,)}
    model = build_model(make_plan(path, dtype="bfloat16", **online))
    assert model.ignored == {"model.layers.1.mlp.experts"}
    weights = {path: set(layer.weights) for path, layer in model.experts.items()}
    assert weights["model.layers.1.mlp.experts"] != weights["model.layers.0.mlp.experts"]
    plain = build_model(make_plan(path, ignored_layers=(pattern,)))
    assert plain.ignored == frozenset()
