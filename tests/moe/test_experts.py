# SPDX-License-Identifier: Apache-2.0
"""A layer comes out of the stager as the contract says, whatever order its matrices came in."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tetrarch.core.errors import CheckpointError
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.types import CanonicalExperts, ExpertActivation, Nvfp4Matrix, Part, PlainExperts
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Activations, Quantization

ONLINE, MODELOPT, NONE = Quantization.NVFP4_ONLINE, Quantization.MODELOPT_FP4, Quantization.NONE
FIELDS = (
    "gate_up",
    "gate_up_block_scale",
    "gate_up_global_scale",
    "down",
    "down_block_scale",
    "down_global_scale",
)


def assert_equal(one: CanonicalExperts, other: CanonicalExperts) -> None:
    for name in FIELDS:
        a, b = (getattr(experts, name).view(torch.uint8) for experts in (one, other))
        assert torch.equal(a, b), name


@pytest.fixture
def sglang(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "sglang_online_weights.safetensors")


@pytest.fixture
def sglang_matrices(sglang: dict[str, Tensor]) -> dict[tuple[Part, int], Tensor]:
    names = {Part.GATE: "w1_gate_bf16", Part.UP: "w3_up_bf16", Part.DOWN: "w2_down_bf16"}
    return {(part, e): sglang[name][e] for part, name in names.items() for e in range(4)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("quantization", [ONLINE, MODELOPT])
def test_matrices_quantized_here_equal_sglangs_bytes_in_any_order(
    sglang: dict[str, Tensor],
    sglang_matrices: dict[tuple[Part, int], Tensor],
    make_spec: Any,
    make_quant: Any,
    stage: Any,
    quantization: Quantization,
    seed: int,
) -> None:
    spec = make_spec(hidden_size=128, intermediate_size=64)
    order = list(sglang_matrices)
    random.Random(seed).shuffle(order)
    experts = stage(spec, make_quant(quantization), {key: sglang_matrices[key] for key in order})
    assert torch.equal(experts.gate_up, sglang["w13_packed_rows_w1_then_w3"])
    assert torch.equal(experts.gate_up_block_scale.view(torch.uint8), sglang["w13_sf_linear"])
    scales = sglang["w13_weight_scale_2"]
    assert torch.equal(experts.gate_up_global_scale, torch.stack((scales, scales), dim=1))
    assert torch.equal(experts.down, sglang["w2_packed"])
    assert torch.equal(experts.down_block_scale.view(torch.uint8), sglang["w2_sf_linear"])
    assert torch.equal(experts.down_global_scale, sglang["w2_weight_scale_2"])


def test_gate_and_up_share_the_larger_ones_scale(
    make_spec: Any, make_quant: Any, make_matrices: Any, stage: Any
) -> None:
    """Negative control of sharing: alone, either half would get another scale."""
    spec = make_spec()
    matrices = make_matrices(spec)
    matrices[Part.UP, 2] = matrices[Part.UP, 2] * 8
    experts = stage(spec, make_quant(ONLINE), matrices)
    gate, up = experts.gate_up_global_scale[2]
    assert gate == up == matrices[Part.UP, 2].float().abs().max() / torch.tensor(2688.0)
    assert nvfp4.encode_weight(matrices[Part.GATE, 2])[2] < gate


def test_an_all_zero_weight_has_scale_one(
    sglang: dict[str, Tensor], make_spec: Any, make_quant: Any, stage: Any
) -> None:
    """Bytes of SGLang's own zero weight; up alone, so that nothing shares its scale."""
    spec = make_spec(
        num_experts=1,
        num_local_experts=1,
        top_k=1,
        hidden_size=32,
        intermediate_size=16,
        activation=ExpertActivation(gated=False),
    )
    zeros = {(part, 0): torch.zeros(spec.shape_of(part)) for part in spec.parts}
    experts = stage(spec, make_quant(ONLINE), zeros)
    assert torch.equal(experts.gate_up[0], sglang["zero_packed"])
    assert torch.equal(experts.gate_up_block_scale[0].view(torch.uint8), sglang["zero_sf"])
    assert experts.gate_up_global_scale.tolist() == [[1.0]]
    assert experts.down_global_scale.tolist() == [1.0]


def test_serialized_matrices_pass_untouched_with_both_their_scales(
    make_spec: Any, make_quant: Any, make_matrices: Any, serialize: Any, stage: Any
) -> None:
    spec = make_spec()
    raw = make_matrices(spec)
    matrices = {(p, e): serialize(raw[p, e] * (3 if p is Part.UP else 1)) for p, e in raw}
    experts = stage(spec, make_quant(MODELOPT), matrices)
    for expert in range(4):
        gate, up, down = (matrices[part, expert] for part in Part)
        assert torch.equal(experts.gate_up[expert], torch.cat((gate.codes, up.codes)))
        block_scale = torch.cat((gate.block_scale, up.block_scale)).view(torch.uint8)
        assert torch.equal(experts.gate_up_block_scale[expert].view(torch.uint8), block_scale)
        assert experts.gate_up_global_scale[expert].tolist() == [
            float(gate.global_scale),
            float(up.global_scale),
        ]
        assert 2 * gate.global_scale < up.global_scale
        assert torch.equal(experts.down[expert], down.codes)
        assert experts.down_global_scale[expert] == down.global_scale


@pytest.mark.parametrize("kind", ["modelopt", "ct"])
@pytest.mark.parametrize("activations", Activations)
def test_a_real_export_decodes_to_its_bf16_source(
    golden: Path,
    exported: Any,
    make_spec: Any,
    make_quant: Any,
    stage: Any,
    kind: str,
    activations: Activations,
) -> None:
    """The coarsest step is a third of a block's largest; half of it, plus the scale's rounding.

    Negative control: with gate and up swapped the same bound fails.
    """
    spec = make_spec(num_experts=2, num_local_experts=2, hidden_size=64, intermediate_size=64)
    matrices = exported(kind)
    experts = stage(spec, make_quant(MODELOPT, activations), matrices)
    source = load_file(golden / "modelopt_nvfp4_tiny_moe" / "source_bf16.safetensors")
    want = source["model.layers.0.mlp.experts.gate_up_proj"].float()
    decoded = nvfp4.decode(
        experts.gate_up,
        experts.gate_up_block_scale,
        global_scale=experts.gate_up_global_scale.repeat_interleave(64, dim=1).unsqueeze(2),
    )
    limit = want.unflatten(2, (-1, 16)).abs().amax(3).repeat_interleave(16, dim=2) * 0.2
    assert bool(((decoded - want).abs() <= limit).all())
    assert not bool(((decoded - want.roll(64, dims=1)).abs() <= limit).all())
    static = activations is Activations.PER_TENSOR
    in13 = max(
        float(matrices[part, e].input_scale) for part in (Part.GATE, Part.UP) for e in (0, 1)
    )
    in2 = max(float(matrices[Part.DOWN, e].input_scale) for e in (0, 1))
    assert float(experts.gate_up_input_scale) == (in13 if static else 1.0)
    assert float(experts.down_input_scale) == (in2 if static else 1.0)


def test_static_input_scales_are_the_largest_of_all_ranks_experts(
    make_spec: Any, make_quant: Any, make_matrices: Any, serialize: Any, stage: Any
) -> None:
    spec = make_spec(num_local_experts=2)
    scales = {(part, e): (e + 1.0) * (i + 1) for i, part in enumerate(Part) for e in range(4)}
    matrices = {
        key: serialize(value, input_scale=scales[key]) for key, value in make_matrices(spec).items()
    }
    experts = stage(spec, make_quant(MODELOPT), matrices)
    assert float(experts.gate_up_input_scale) == 8.0  # up of expert 3, which another rank holds
    assert float(experts.down_input_scale) == 12.0
    assert experts.gate_up.shape[0] == 2


@pytest.mark.parametrize("serialized", [True, False])
def test_absent_input_scales_are_one(
    make_spec: Any,
    make_quant: Any,
    make_matrices: Any,
    serialize: Any,
    stage: Any,
    serialized: bool,
) -> None:
    spec = make_spec()
    matrices = make_matrices(spec)
    if serialized:
        matrices = {key: serialize(value) for key, value in matrices.items()}
    experts = stage(spec, make_quant(MODELOPT), matrices)
    assert experts.gate_up_input_scale.item() == experts.down_input_scale.item() == 1.0


def test_input_scales_that_only_some_experts_have_are_refused_where_they_count(
    make_spec: Any, make_quant: Any, make_matrices: Any, serialize: Any, stage: Any
) -> None:
    spec = make_spec()
    matrices = {
        (part, e): serialize(value, input_scale=None if (part, e) == (Part.UP, 3) else 0.5)
        for (part, e), value in make_matrices(spec).items()
    }
    with pytest.raises(CheckpointError, match="input scales are incomplete") as refused:
        stage(spec, make_quant(MODELOPT, Activations.PER_TENSOR), matrices)
    assert refused.value.why == "missing: up of expert 3"
    for activations in (Activations.PER_TOKEN, Activations.BF16):
        assert stage(spec, make_quant(MODELOPT, activations), matrices).down_input_scale == 1.0


def test_experts_of_other_ranks_are_dropped(
    make_spec: Any, make_quant: Any, make_matrices: Any, stage: Any
) -> None:
    whole = stage(make_spec(), make_quant(ONLINE), make_matrices(make_spec()))
    for first in (0, 1, 3):
        spec = make_spec(num_local_experts=1, first_local_expert=first)
        share = stage(spec, make_quant(ONLINE), make_matrices(spec))
        for name in FIELDS:
            own = getattr(whole, name)[first : first + 1].view(torch.uint8)
            assert torch.equal(getattr(share, name).view(torch.uint8), own), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quantization", [ONLINE, MODELOPT, NONE])
def test_a_layer_that_runs_unquantized_has_the_models_dtype(
    make_spec: Any,
    make_quant: Any,
    make_matrices: Any,
    stage: Any,
    quantization: Quantization,
    dtype: torch.dtype,
) -> None:
    spec = make_spec(dtype=dtype)
    matrices = make_matrices(spec)
    experts = stage(spec, make_quant(quantization), matrices, ignored=quantization is not NONE)
    assert isinstance(experts, PlainExperts)
    for e in range(4):
        gate_up = torch.cat((matrices[Part.GATE, e], matrices[Part.UP, e])).to(dtype)
        assert torch.equal(experts.gate_up[e], gate_up)
        assert torch.equal(experts.down[e], matrices[Part.DOWN, e].to(dtype))


@pytest.mark.parametrize("quantization", [MODELOPT, NONE])
def test_serialized_experts_that_run_unquantized_are_decoded(
    make_spec: Any,
    make_quant: Any,
    make_matrices: Any,
    serialize: Any,
    stage: Any,
    quantization: Quantization,
) -> None:
    spec = make_spec()
    matrices = {key: serialize(value) for key, value in make_matrices(spec).items()}
    experts = stage(spec, make_quant(quantization), matrices, ignored=quantization is not NONE)
    up = matrices[Part.UP, 1]
    want = nvfp4.decode(up.codes, up.block_scale, global_scale=up.global_scale)
    assert torch.equal(experts.gate_up[1, 32:], want.bfloat16())


def test_biases_lie_gate_before_up(
    make_spec: Any, make_quant: Any, make_matrices: Any, stage: Any
) -> None:
    spec = make_spec(has_bias=True)
    biases = {
        (part, e): torch.full(spec.shape_of(part)[:1], 10.0 * e + i)
        for i, part in enumerate(Part)
        for e in range(4)
    }
    for quantization in (ONLINE, NONE):
        experts = stage(spec, make_quant(quantization), make_matrices(spec), biases=biases)
        assert experts.gate_up_bias.dtype == spec.dtype
        assert experts.gate_up_bias[2, 31:33].tolist() == [20.0, 21.0]
        assert experts.down_bias[3].tolist() == [32.0] * 64


def test_missing_matrices_and_biases_are_named(
    make_spec: Any, make_quant: Any, make_matrices: Any
) -> None:
    spec = make_spec(has_bias=True, num_local_experts=2, first_local_expert=2)
    stager = ExpertStager(spec, make_quant(ONLINE), layer="layers.7.mlp.experts")
    for (part, expert), value in make_matrices(spec).items():
        if (part, expert) not in ((Part.UP, 2), (Part.DOWN, 0)):
            stager.put(part, expert, value)
        if (part, expert) != (Part.GATE, 3):
            stager.put_bias(part, expert, value[:, 0])
    assert stager.missing() == [(Part.UP, 2)]
    with pytest.raises(CheckpointError, match=r"layers\.7\.mlp\.experts") as refused:
        stager.finish()
    assert refused.value.why == "missing: up of expert 2, gate bias of expert 3"


def _damaged(matrix: Nvfp4Matrix, **changes: Any) -> Nvfp4Matrix:
    fields = {name: getattr(matrix, name) for name in Nvfp4Matrix.__slots__}
    return Nvfp4Matrix(**(fields | changes))


DAMAGE: dict[str, Callable[[Tensor, Nvfp4Matrix], Tensor | Nvfp4Matrix]] = {
    "its global scale is 0.0": lambda _, m: _damaged(m, global_scale=torch.zeros(())),
    "its global scale is -1.0": lambda _, m: _damaged(m, global_scale=-torch.ones(())),
    "its global scale is nan": lambda _, m: _damaged(m, global_scale=torch.tensor(torch.nan)),
    "its global scale is inf": lambda _, m: _damaged(m, global_scale=torch.tensor(torch.inf)),
    "its input scale is 0.0": lambda _, m: _damaged(m, input_scale=torch.zeros(())),
    "its block scales (groups of 16)": lambda _, m: _damaged(m, block_scale=m.block_scale[:, ::2]),
    "its codes are (32, 31)": lambda _, m: _damaged(m, codes=m.codes[:, 1:]),
    "NaN or negative": lambda _, m: _damaged(m, block_scale=(-m.block_scale.float()).to(E4M3)),
    "expected one float32": lambda _, m: _damaged(m, global_scale=torch.ones(2)),
    "it is (64, 32)": lambda matrix, _: matrix.T,
    "it is (32, 64) torch.int8": lambda matrix, _: matrix.to(torch.int8),
    "it holds NaN or infinite values": lambda matrix, _: matrix.index_fill(0, ONE, torch.nan),
}
E4M3, ONE = torch.float8_e4m3fn, torch.tensor([1])


def _put_and_check(stager: ExpertStager, matrix: Tensor | Nvfp4Matrix) -> None:
    stager.put(Part.GATE, 1, matrix)
    stager.check()


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_matrix_is_refused_by_part_and_expert(
    make_spec: Any, make_quant: Any, make_matrices: Any, serialize: Any, why: str
) -> None:
    spec = make_spec()
    matrix = make_matrices(spec)[Part.GATE, 1]
    stager = ExpertStager(spec, make_quant(MODELOPT))
    damaged = DAMAGE[why](matrix, serialize(matrix))
    with pytest.raises(CheckpointError, match="gate of expert 1 cannot be loaded") as refused:
        _put_and_check(stager, damaged)
    assert why in refused.value.why


def test_what_does_not_belong_is_refused_by_part_and_expert(
    make_spec: Any, make_quant: Any, make_matrices: Any, serialize: Any
) -> None:
    spec = make_spec()
    gate = make_matrices(spec)[Part.GATE, 0]
    stager = ExpertStager(spec, make_quant(MODELOPT))
    stager.put(Part.GATE, 0, gate)
    with pytest.raises(CheckpointError, match="it came twice"):
        stager.put(Part.GATE, 0, gate)
    with pytest.raises(CheckpointError, match=r"up of expert 4 .*\n.*experts 0 to 3 have gate, up"):
        stager.put(Part.UP, 4, gate)
    with pytest.raises(CheckpointError, match=r"up of expert 0 .*\n.*others here are not"):
        stager.put(Part.UP, 0, serialize(gate))
    with pytest.raises(CheckpointError, match="these experts have no bias"):
        stager.put_bias(Part.UP, 0, gate[:, 0])
    plain = make_spec(activation=ExpertActivation(gated=False), has_bias=True)
    with pytest.raises(CheckpointError, match=r"gate of expert 0 .*\n.*have up, down"):
        ExpertStager(plain, make_quant(MODELOPT)).put(Part.GATE, 0, gate)
    with pytest.raises(CheckpointError, match=r"up of expert 0 .*\n.*expected \(32,\)"):
        ExpertStager(plain, make_quant(MODELOPT)).put_bias(Part.UP, 0, gate[0])


def test_a_contract_refuses_the_kind_of_source_it_does_not_take(
    make_spec: Any, make_quant: Any, make_matrices: Any, serialize: Any
) -> None:
    gate = make_matrices(make_spec())[Part.GATE, 0]
    with pytest.raises(CheckpointError, match="is serialized NVFP4") as refused:
        ExpertStager(make_spec(), make_quant(ONLINE)).put(Part.GATE, 0, serialize(gate))
    assert "modelopt_fp4" in refused.value.fix
    stager = ExpertStager(make_spec(), make_quant(MODELOPT, Activations.PER_TOKEN))
    with pytest.raises(CheckpointError, match="is not quantized") as refused:
        stager.put(Part.GATE, 0, gate)
    assert "nvfp4_online" in refused.value.fix


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made under it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def _release(self, address: int, num_bytes: int) -> None:
        self.now -= num_bytes
        self._known.discard(address)

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes and address not in self._known:
            self._known.add(address)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, address, num_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return out


@pytest.mark.parametrize("order", [tuple(Part), (Part.DOWN, Part.UP, Part.GATE)])
def test_peak_memory_is_the_layer_and_one_experts_raw_matrices(
    make_spec: Any, make_quant: Any, order: tuple[Part, ...]
) -> None:
    """Plus the encoder's own temporaries, which do not grow with the matrix (chunks of 64 Ki)."""
    spec = make_spec(num_experts=8, num_local_experts=8, hidden_size=1024, intermediate_size=1024)
    live = LiveBytes()
    with live:
        stager = ExpertStager(spec, make_quant(ONLINE))
        for expert in range(8):
            for part in order:
                stager.put(part, expert, torch.randn(spec.shape_of(part), dtype=torch.bfloat16))
        experts = stager.finish()
    layer = sum(getattr(experts, name).nbytes for name in FIELDS)
    one_expert = 3 * 1024 * 1024 * 2
    temporaries = 20 * 4 * (1 << 16)
    assert layer > 2 * one_expert  # the layer dominates: holding the raw layer would be seen
    assert live.now <= layer + 64
    assert live.peak <= layer + one_expert + temporaries


def test_the_memory_counter_sees_a_copy_that_is_held() -> None:
    """Negative control of the counter: two live megabytes count as two, one released as one."""
    live = LiveBytes()
    with live:
        first = torch.zeros(1 << 20, dtype=torch.uint8)
        second = first.clone()
        assert live.now == live.peak == 2 << 20
        del second
        assert (live.now, live.peak) == (1 << 20, 2 << 20)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_is_complete_with_its_last_matrix_and_not_before(
    make_spec: Any, make_quant: Any, make_matrices: Any, *, has_bias: bool, gated: bool
) -> None:
    spec = make_spec(activation=ExpertActivation(gated=gated), has_bias=has_bias)
    stager = ExpertStager(spec, make_quant(ONLINE))
    everything: list[Any] = [
        (stager.put, *key, value) for key, value in make_matrices(spec).items()
    ]
    if has_bias:
        everything += [
            (stager.put_bias, part, expert, torch.ones(spec.shape_of(part)[0]))
            for part in spec.parts
            for expert in range(spec.num_experts)
        ]
    for put, part, expert, value in everything:
        assert not stager.is_complete
        put(part, expert, value)
    assert stager.is_complete
    stager.finish()
