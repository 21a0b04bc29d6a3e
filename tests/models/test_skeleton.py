# SPDX-License-Identifier: Apache-2.0
"""One look at a model without data finds its experts and its attention, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from tetrarch.models.experts import is_expert_module
from tetrarch.models.skeleton import read_skeleton


def test_every_layer_is_seen_and_the_model_is_left_as_it_was(
    tiny: ModuleType, tiny_checkpoint: Callable[..., object]
) -> None:
    for family in tiny.FAMILIES:
        checkpoint = tiny_checkpoint(family)
        skeleton = read_skeleton(str(checkpoint.path), dtype=torch.bfloat16)
        modules = dict(skeleton.model.named_modules())
        assert [site.index for site in skeleton.attention] == [0, 1, 2, 3]
        assert all(site.name in modules for site in skeleton.attention)
        assert [site.path for site in skeleton.experts] == [
            path for path, module in modules.items() if is_expert_module(module)
        ]
        assert {site.top_k for site in skeleton.experts} == {2}
        assert all(p.is_meta for p in skeleton.model.parameters())
        theirs = checkpoint.reference.state_dict()
        assert {n: p.shape for n, p in skeleton.model.state_dict().items()} == {
            n: p.shape for n, p in theirs.items()
        }


def test_latent_attention_keeps_one_compressed_head(
    tiny_checkpoint: Callable[..., object],
) -> None:
    sites = read_skeleton(str(tiny_checkpoint("deepseek_v3").path), dtype=torch.bfloat16).attention
    assert {(s.latent, s.num_kv_heads, s.key_dim, s.value_dim) for s in sites} == {(True, 1, 16, 8)}
    sites = read_skeleton(str(tiny_checkpoint("glm4_moe").path), dtype=torch.bfloat16).attention
    assert {(s.latent, s.num_kv_heads, s.key_dim, s.value_dim) for s in sites} == {
        (False, 2, 16, 16)
    }


def test_a_training_loss_left_on_in_the_config_is_turned_off(
    tiny: ModuleType, tmp_path: Path
) -> None:
    tiny.tiny_config("mixtral", output_router_logits=True).save_pretrained(tmp_path)
    model = read_skeleton(str(tmp_path), dtype=torch.bfloat16).model
    assert vars(model.config)["output_router_logits"] is False
