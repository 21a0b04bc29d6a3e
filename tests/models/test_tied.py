# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from tetrarch.core.errors import CheckpointError
from tetrarch.models.build import build_model
from tetrarch.models.report import Unused
from tetrarch.models.sources import TensorSource


def test_a_head_of_its_own_is_not_left_out_for_a_copy(lab: Any) -> None:
    """A config.json that ties it by mistake; nothing is written, and the tensor is named."""
    path = lab.tiny("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    plan, embedding = lab.plan(path), tensors["model.embed_tokens.weight"]
    for copy in (embedding.clone(), embedding.double()):
        source = TensorSource({**tensors, "lm_head.weight": copy})
        report = lab.fill(build_model(plan), source, plan)
        assert report.unused == {Unused.TIED: ("lm_head.weight",)}
    model, head = build_model(plan), embedding.clone()
    head[0, 0] += 1
    before = lab.bits(model)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight of .* is not what") as refused:
        lab.fill(model, TensorSource({**tensors, "lm_head.weight": head}), plan)
    assert "model.embed_tokens.weight" in refused.value.why
    assert "tie_word_embeddings" in refused.value.fix
    assert lab.bits(model) == before
