# SPDX-License-Identifier: Apache-2.0
"""Matrices land in their rows, and gate and up agree on a scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from interpreter import repair
from tetrarch.moe import stores
from tetrarch.moe.registry import ENCODERS
from tetrarch.moe.stores import PackedStore, PlainStore
from tetrarch.moe.types import CanonicalExperts, ExpertActivation, ExpertSpec, Part
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import WEIGHT_RECIPE

ONES = {"gate_up_input_scale": torch.ones(()), "down_input_scale": torch.ones(())}


@pytest.mark.parametrize("gated", [True, False])
def test_each_part_decodes_from_its_own_rows(
    make_spec: Any, make_matrices: Any, gated: bool
) -> None:
    """Powers of two survive NVFP4 exactly, so that a row out of place would be seen."""
    spec: ExpertSpec = make_spec(activation=ExpertActivation(gated=gated))
    store = PackedStore(spec, WEIGHT_RECIPE)
    values = {
        (part, e): torch.full(spec.shape_of(part), 2.0 ** (4 * i - e))
        for i, part in enumerate(spec.parts)
        for e in range(4)
    }
    for (part, e), value in values.items():
        store.put(part, e, value)
    experts = store.finish(input_scales=ONES, biases={})
    assert experts.gate_up_global_scale.shape == (4, 2 if gated else 1)
    rows_per_column = spec.intermediate_size
    for (part, e), value in values.items():
        rows = spec.rows_of(part)
        if part is Part.DOWN:
            codes, scale, s2 = experts.down, experts.down_block_scale, experts.down_global_scale[e]
        else:
            codes, scale = experts.gate_up, experts.gate_up_block_scale
            s2 = experts.gate_up_global_scale[e, rows.start // rows_per_column]
        decoded = nvfp4.decode(codes[e, rows], scale[e, rows], global_scale=s2)
        torch.testing.assert_close(decoded, value, rtol=1e-6, atol=0)


def test_the_first_of_gate_and_up_waits_for_the_second(make_spec: Any, make_matrices: Any) -> None:
    spec, matrices = make_spec(), make_matrices(make_spec())
    both = torch.cat((matrices[Part.GATE, 0], matrices[Part.UP, 0]))
    codes, _, scale = nvfp4.encode_weight(both)
    for order in ((Part.GATE, Part.UP), (Part.UP, Part.GATE)):
        store = PackedStore(spec, WEIGHT_RECIPE)
        for part in order:
            store.put(part, 0, matrices[part, 0])
        experts = store.finish(input_scales=ONES, biases={})
        assert torch.equal(experts.gate_up[0], codes)
        assert experts.gate_up_global_scale[0].tolist() == [float(scale)] * 2


def test_plain_rows_are_in_the_models_dtype(make_spec: Any, make_matrices: Any) -> None:
    spec = make_spec(dtype=torch.float16)
    store, matrices = PlainStore(spec), make_matrices(spec)
    for (part, e), value in matrices.items():
        store.put(part, e, value)
    experts = store.finish(biases={})
    assert torch.equal(experts.gate_up[3, 32:], matrices[Part.UP, 3].half())
    assert torch.equal(experts.down[1], matrices[Part.DOWN, 1].half())


@pytest.mark.parametrize("place", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gpus_encoder_writes_the_references_bytes(
    make_spec: Any,
    make_matrices: Any,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """On the CPU the table's other row is put in the place of its own."""
    pytest.importorskip("triton", reason="pip install tetrarch[test-kernels]")
    if (place == "cuda") != torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, else interpreted")
    sizes = {"num_experts": 1, "num_local_experts": 1, "hidden_size": 16, "intermediate_size": 16}
    spec = make_spec(**sizes if place == "interpreter" else {})
    matrices = make_matrices(spec)

    def store(device: str) -> CanonicalExperts:
        filled = PackedStore(replace(spec, device=torch.device(device)), WEIGHT_RECIPE)
        for (part, expert), value in matrices.items():
            filled.put(part, expert, value)
        return filled.finish(input_scales=ONES, biases={})

    want = store("cpu")
    if place == "interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton decorates a kernel
        repair()
        monkeypatch.setattr(stores, "ENCODERS", {"cpu": ENCODERS["cuda"]})
    have = store("cpu" if place == "interpreter" else "cuda")
    for name in ("gate_up", "down"):
        for suffix in ("", "_block_scale", "_global_scale"):
            ours, theirs = (getattr(one, name + suffix).cpu() for one in (have, want))
            octets = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (ours, theirs)]
            assert torch.equal(*octets), name + suffix
