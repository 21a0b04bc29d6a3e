# SPDX-License-Identifier: Apache-2.0
"""What a model on `meta` is given: slots, FP32 islands, computed buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tetrarch.config.plan import Plan
from tetrarch.models.build import build_model
from tetrarch.moe.layer import MoELayer

MakePlan = Callable[..., Plan]
TinyCheckpoint = Callable[..., object]


def test_parameters_are_their_slots(tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan) -> None:
    for family in ("qwen3_moe", "deepseek_v3", "minimax_m2", "gpt_oss"):
        model = build_model(make_plan(tiny_checkpoint(family).path))
        owned = dict(model.hf.named_parameters())
        owned |= {n: b for n, b in model.hf.named_buffers() if n in model.weights}
        assert owned.keys() == set(model.weights)
        where = {name: tensor.data_ptr() for name, tensor in owned.items()}
        assert where == model.weights.addresses()
        assert all(isinstance(model.hf.get_submodule(p), MoELayer) for p in model.experts)
        assert not any(p.requires_grad for p in model.hf.parameters())
        assert not any(t.is_meta for t in [*model.hf.parameters(), *model.hf.buffers()])


def test_weights_and_children_are_plain_attributes(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        for module in build_model(make_plan(tiny_checkpoint(family).path)).hf.modules():
            tables = (module.named_parameters, module.named_buffers)
            found = {name: value for table in tables for name, value in table(recurse=False)}
            for name, value in (found | dict(module.named_children())).items():
                assert vars(module)[name] is value


def test_routers_keep_an_fp32_bias_and_little_else(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    for family in ("deepseek_v3", "minimax_m2", "glm4_moe"):
        model = build_model(make_plan(tiny_checkpoint(family).path, dtype="bfloat16"))
        wide = {n for n, slot in model.weights.items() if slot.dtype == torch.float32}
        assert wide == {n for n in model.weights if n.endswith("e_score_correction_bias")}
        assert len(wide) in (3, 4)
        assert model.dtype == torch.bfloat16
    half = build_model(make_plan(tiny_checkpoint("gpt_oss").path, dtype="float16"))
    wide = {n for n, slot in half.weights.items() if slot.dtype == torch.float32}
    assert wide == {n for n in half.weights if "norm" in n}


def test_rotary_frequencies_are_computed_in_fp32(
    tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan
) -> None:
    for family in ("gpt_oss", "deepseek_v3", "glm4_moe", "minimax_m2"):  # YaRN, partial, plain
        checkpoint = tiny_checkpoint(family)
        model = build_model(make_plan(checkpoint.path, dtype="bfloat16"))
        rows, positions = torch.empty(0, dtype=model.dtype), torch.arange(64)[None]
        theirs = checkpoint.reference.base_model.rotary_emb(rows, positions)
        ours = model.hf.base_model.get_submodule("rotary_emb")(rows, positions)
        assert all(map(torch.equal, ours, theirs))


def test_a_tied_head_is_the_embedding(tiny_checkpoint: TinyCheckpoint, make_plan: MakePlan) -> None:
    checkpoint = tiny_checkpoint("qwen3_moe", tie_word_embeddings=True)
    model = build_model(make_plan(checkpoint.path))
    assert "lm_head.weight" not in model.weights
    head = model.hf.get_parameter("lm_head.weight")
    assert head.data_ptr() == model.weights["model.embed_tokens.weight"].data_ptr()
