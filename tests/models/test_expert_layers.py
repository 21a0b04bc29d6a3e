# SPDX-License-Identifier: Apache-2.0
"""Each expert module of a skeleton gives its place to a layer of ours, of its contract."""

from __future__ import annotations

from typing import Any

import torch

from tetrarch.memory.slots import SlotTable
from tetrarch.models.expert_layers import swap_experts
from tetrarch.models.skeleton import read_skeleton
from tetrarch.numerics.contract import Quantization


def test_every_expert_module_is_replaced_and_scratch_is_shared(lab: Any) -> None:
    path = lab.tiny("deepseek_v3")
    plan = lab.plan(path, quantization=Quantization.NVFP4_ONLINE)
    skeleton, scratch = read_skeleton(str(path), dtype=torch.float32), SlotTable()
    plain = skeleton.experts[1].path
    layers = swap_experts(
        skeleton,
        plan,
        device=torch.device("cpu"),
        ignored=frozenset({plain}),
        scratch=scratch,
        arena=None,
    )
    assert list(layers) == [site.path for site in skeleton.experts]
    assert len(layers) == 3  # the first of four layers is dense
    for site in skeleton.experts:
        layer = layers[site.path]
        assert skeleton.model.get_submodule(site.path) is layer
        assert (layer.spec.num_experts, layer.spec.top_k) == (8, 2)
        held = {one.data_ptr() for one in scratch.values()}
        assert {one.data_ptr() for one in layer.scratch.values()} <= held
        packed = any(name.endswith("block_scale") for name in layer.weights)
        assert packed is (site.path != plain)
