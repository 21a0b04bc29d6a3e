# SPDX-License-Identifier: Apache-2.0
"""The torch runner against other projects' numbers, Hugging Face, and its own promises."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tetrarch.core.errors import CapacityExceeded, Unsupported
from tetrarch.memory.checksum import digest
from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.runners.reference import ReferenceRunner
from tetrarch.moe.types import (
    CanonicalExperts,
    Dispatched,
    ExpertActivation,
    ExpertSpec,
    PlainExperts,
    Routing,
)
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Activations, Quantization

ONLINE, MODELOPT, NONE = Quantization.NVFP4_ONLINE, Quantization.MODELOPT_FP4, Quantization.NONE
TOKEN, TENSOR, BF16 = Activations.PER_TOKEN, Activations.PER_TENSOR, Activations.BF16
QUANTIZED = ((ONLINE, TOKEN), (MODELOPT, TENSOR), (ONLINE, BF16))
CONTRACTS = (*QUANTIZED, (NONE, BF16))
contracts = pytest.mark.parametrize(("quantization", "activations"), CONTRACTS)


class Spy:
    """Stands before the activation quantizers and keeps what went in and came out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, Any]] = []
        for name in ("fake_quant", "fake_quant_per_token"):
            monkeypatch.setattr(nvfp4, name, self._watch(getattr(nvfp4, name)))

    def _watch(self, quantize: Callable[..., Any]) -> Callable[..., Any]:
        def watched(values: Tensor, **options: Any) -> Any:
            result = quantize(values, **options)
            self.calls.append((values, result))
            return result

        return watched


@pytest.fixture(scope="module")
def flashinfer(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "moe.safetensors")


def golden_spec(make_spec: Any, *, gated: bool = True) -> ExpertSpec:
    activation = ExpertActivation(gated=gated)
    return make_spec(hidden_size=128, intermediate_size=64, activation=activation)


def golden_experts(f: dict[str, Tensor], *, gated: bool = True) -> CanonicalExperts:
    """Put gate before up; the non-gated reference uses the up rows alone."""
    up_gate, block_scale = f["w13_up_gate_packed"], f["w13_up_gate_sf_linear"]
    scale = f["w13_weight_scale_2"]
    e4m3 = torch.float8_e4m3fn
    return CanonicalExperts(
        gate_up=up_gate.roll(64, dims=1) if gated else up_gate[:, :64],
        gate_up_block_scale=(
            block_scale.roll(64, dims=1) if gated else block_scale[:, :64].contiguous()
        ).view(e4m3),
        gate_up_global_scale=scale.unsqueeze(1).repeat(1, 2 if gated else 1),
        down=f["w2_packed"],
        down_block_scale=f["w2_sf_linear"].view(e4m3),
        down_global_scale=f["w2_weight_scale_2"],
        gate_up_input_scale=f["x_static.w13_input_scale_quant"][0].reciprocal(),
        down_input_scale=f["static.fc2_input_scale"][0].reciprocal(),
    )


def slot_order(rows: Tensor, ids: Tensor) -> Tensor:
    """Undo the sort by expert: the goldens list rows by (token, slot)."""
    order = ids.flatten().argsort(stable=True)
    restored = torch.empty_like(rows)
    restored[order] = rows
    return restored


GOLDENS = [
    ("token_fc2_1over2688", ONLINE, TOKEN),
    ("token_fc2_1.0_sglang_cutedsl", ONLINE, TOKEN),
    ("token_relu2_fc2_1over2688", ONLINE, TOKEN),
    ("static", MODELOPT, TENSOR),
    ("w4a16", MODELOPT, BF16),
    ("w4a16_relu2", ONLINE, BF16),
]


@pytest.fixture
def run_golden(
    flashinfer: dict[str, Tensor], make_spec: Any, make_quant: Any, make_layer: Any
) -> Callable[..., Tensor]:
    def run(tag: str, quantization: Quantization, activations: Activations, **swap: Any) -> Tensor:
        gated = "relu2" not in tag
        factor = 1.0 if "1.0" in tag else 1 / 2688
        quant = make_quant(quantization, activations, fc2_input_scale=factor)
        experts = replace(golden_experts(flashinfer, gated=gated), **swap)
        layer = make_layer(golden_spec(make_spec, gated=gated), quant, experts)
        return layer(flashinfer["x_bf16"], flashinfer["topk_ids"], flashinfer["topk_weights"])

    return run


def golden_error(f: dict[str, Tensor], tag: str, output: Tensor) -> float:
    """Return the error relative to the norm, an FP32 output or a BF16 one being the golden."""
    name = f"{tag}.output_f32" if f"{tag}.output_f32" in f else f"{tag}.output_bf16"
    want = f[name].float()
    return float((output.float() - want).norm() / want.norm())


# Two BF16 roundings, of each route's row and of the sum, that the FP32 goldens do not have: half a
# unit in the last place is up to 2**-9 of a value, about 2**-9 in the norm for the two together.
# The W4A16 goldens add BF16 roundings of their own.
ROUNDING = {TOKEN: 2**-8, TENSOR: 2**-8, BF16: 2**-7}


@pytest.mark.parametrize(("tag", "quantization", "activations"), GOLDENS)
def test_a_layer_equals_flashinfers_reference(
    flashinfer: dict[str, Tensor],
    run_golden: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tag: str,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """The intermediate bit for bit, the output within the roundings that it has and they lack.

    Except for static scales: their reference rounds the intermediate to BF16 before it quantizes,
    the kernel and we do not, so that a code in a thousand is a neighbour's.
    """
    spy = Spy(monkeypatch)
    output = run_golden(tag, quantization, activations)
    assert golden_error(flashinfer, tag, output) < ROUNDING[activations]
    if activations is BF16:
        return
    x = "x_token" if activations is TOKEN else "x_static"
    check_products(flashinfer, x, spy.calls[0][1])
    ids = flashinfer["topk_ids"]
    values, result = spy.calls[1]
    rows = slot_order(values, ids)
    assert torch.equal(rows.bfloat16(), flashinfer[f"{tag}.fc2_in_bf16"])
    result = (
        tuple(slot_order(r, ids) for r in result)
        if activations is TOKEN
        else slot_order(result, ids)
    )
    check_products(flashinfer, f"{tag}.fc2_in", result, budget=0 if activations is TOKEN else 2)


def check_products(f: dict[str, Tensor], prefix: str, result: Any, *, budget: int = 0) -> None:
    """Compare decoded codes, and the token scales where there are some, with a golden's bytes."""
    products = result[0] if isinstance(result, tuple) else result
    packed = f[f"{prefix}.packed"] if f"{prefix}.packed" in f else f[f"{prefix}_packed"]
    block_scale = f[f"{prefix}.sf"] if f"{prefix}.sf" in f else f[f"{prefix}_sf"]
    want = nvfp4.decode_exact_products(
        packed, block_scale.view(torch.float8_e4m3fn), dtype=torch.float32
    )
    assert int((products != want).sum()) <= budget
    if isinstance(result, tuple):
        name = f"{prefix}.per_token_scale"
        assert torch.equal(result[1], f[name] if name in f else f[f"{prefix}_per_token_scale"])


def test_with_one_rounding_a_layer_equals_flashinfers_reference(
    flashinfer: dict[str, Tensor],
    run_golden: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first GEMM apart from the second's quantizer: this golden leaves the intermediate BF16.

    Negative control: with the second rounding the layer is far from it.
    """
    tag = "token_no_fc2_quant"
    both = golden_error(flashinfer, tag, run_golden(tag, ONLINE, TOKEN))
    assert both > 4 * ROUNDING[TOKEN]
    quantize, gemm = nvfp4.fake_quant_per_token, itertools.count(1)

    def first_only(rows: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if next(gemm) == 1:
            return quantize(rows, **options)
        return rows.float(), torch.ones(rows.shape[0])

    monkeypatch.setattr(nvfp4, "fake_quant_per_token", first_only)
    assert golden_error(flashinfer, tag, run_golden(tag, ONLINE, TOKEN)) < ROUNDING[TOKEN]


@pytest.mark.parametrize(("tag", "quantization", "activations"), GOLDENS)
def test_wrong_weights_do_not_equal_flashinfers_reference(
    flashinfer: dict[str, Tensor],
    run_golden: Callable[..., Tensor],
    tag: str,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """Negative controls: the next expert's weights, one scale 10 % off, gate and up swapped."""
    good = golden_experts(flashinfer, gated="relu2" not in tag)
    swaps: list[dict[str, Tensor]] = [
        {"down": good.down.roll(1, dims=0)},
        {"gate_up": good.gate_up.roll(1, dims=0)},
        {"down_global_scale": good.down_global_scale * torch.tensor([1, 1, 1, 1.1])},
    ]
    if "relu2" not in tag:
        swaps.append({"gate_up": good.gate_up.roll(64, dims=1)})
    for swap in swaps:
        output = run_golden(tag, quantization, activations, **swap)
        assert golden_error(flashinfer, tag, output) > 4 * ROUNDING[activations]


def hugging_face(kind: str) -> tuple[torch.nn.Module, ExpertSpec, PlainExperts]:
    """Return a Hugging Face experts module, and its geometry and weights in our layout."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "_experts_implementation": "eager"}
    activation, has_bias = ExpertActivation(), False
    if kind == "gpt_oss":
        activation, has_bias = ExpertActivation(alpha=1.702, beta=1.0, limit=7.0), True
        config: Any = GptOssConfig(num_local_experts=4, intermediate_size=32, **sizes)
        module: Any = GptOssExperts(config)
    elif kind == "qwen3_moe":
        config = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=32, **sizes)
        module = Qwen3MoeExperts(config)
    else:  # relu2, in a latent space of 48
        activation = ExpertActivation(gated=False)
        config = NemotronHConfig(
            n_routed_experts=4, moe_intermediate_size=32, moe_latent_size=48, **sizes
        )
        module = NemotronHExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=2.0 if parameter.dim() == 2 else 0.5)
    spec = ExpertSpec(
        num_experts=4,
        num_local_experts=4,
        first_local_expert=0,
        top_k=2,
        hidden_size=48 if kind == "nemotron_h" else 64,
        intermediate_size=32,
        activation=activation,
        has_bias=has_bias,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    w = {name: value.detach() for name, value in module.named_parameters()}
    if kind != "gpt_oss":
        gate_up = w["up_proj"] if kind == "nemotron_h" else w["gate_up_proj"]
        return module, spec, PlainExperts(gate_up=gate_up, down=w["down_proj"])
    apart = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    return (
        module,
        spec,
        PlainExperts(
            gate_up=w["gate_up_proj"].mT[:, apart].contiguous(),
            down=w["down_proj"].mT.contiguous(),
            gate_up_bias=w["gate_up_proj_bias"][:, apart],
            down_bias=w["down_proj_bias"],
        ),
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_plain_experts_equal_hugging_face(
    make_quant: Any, make_layer: Any, make_tokens: Any, kind: str
) -> None:
    """SwiGLU; biases with the clamped gate, values beyond the clamp included; relu2 in a latent."""
    module, spec, experts = hugging_face(kind)
    layer = make_layer(spec, make_quant(NONE), experts)
    hidden, ids, weights = make_tokens(spec, 13)
    with torch.no_grad():
        want = module(hidden, ids, weights)
    torch.testing.assert_close(layer(hidden, ids, weights), want, rtol=2e-6, atol=2e-5)
    assert want.abs().max() > 10
    if spec.activation.gated:
        swapped = replace(experts, gate_up=experts.gate_up.roll(32, dims=1))
        wrong = make_layer(spec, make_quant(NONE), swapped)(hidden, ids, weights)
        assert (wrong - want).abs().max() > 1


@pytest.mark.parametrize("kind", ["modelopt", "ct"])
def test_a_real_export_equals_hugging_face_on_its_decoded_weights(
    exported: Any,
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    stage: Any,
    kind: str,
) -> None:
    """W4A16 in FP32, where only the order of roundings differs. ModelOpt's own file, and its
    conversion to compressed-tensors. Negative control: the other contract, which rounds inputs.
    """
    spec = make_spec(
        num_experts=2,
        num_local_experts=2,
        hidden_size=64,
        intermediate_size=64,
        dtype=torch.float32,
    )
    config: Any = Qwen3MoeConfig(
        num_experts=2, moe_intermediate_size=64, hidden_size=64, _experts_implementation="eager"
    )
    module: Any = Qwen3MoeExperts(config)
    plain = stage(spec, make_quant(NONE), exported(kind))
    module.load_state_dict({"gate_up_proj": plain.gate_up, "down_proj": plain.down})
    tokens = make_tokens(spec, 16)
    with torch.no_grad():
        want = module(*tokens)
    for activations, close in ((BF16, True), (TOKEN, False), (TENSOR, False)):
        quant = make_quant(MODELOPT, activations)
        output = make_layer(spec, quant, stage(spec, quant, exported(kind)))(*tokens)
        error = (output - want).norm() / want.norm()
        assert error < 1e-5 if close else 0.01 < error < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@contracts
def test_a_gpu_computes_what_the_cpu_computes(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """Sums of NVFP4 products are exact; exp's last place may move a code here and there."""
    cpu, gpu = (make_spec(device=torch.device(kind)) for kind in ("cpu", "cuda"))
    quant, tokens = make_quant(quantization, activations), make_tokens(cpu, 32)
    want = make_layer(cpu, quant)(*tokens).float()
    layer = make_layer(gpu, quant)
    output = layer(*(tensor.cuda() for tensor in tokens)).float().cpu()
    assert (output - want).norm() / want.norm() < 0.005
    share = torch.where(tokens[1] < 2, tokens[1], -1)
    masked = layer(tokens[0].cuda(), share.cuda(), tokens[2].cuda()).float().cpu()
    assert not torch.equal(masked, output)
    assert masked[(share == -1).all(1)].eq(0).all()


def dynamic_per_tensor(rows: Tensor, *, factor: float, **_: Any) -> tuple[Tensor, Tensor]:
    """What per-token must not be: one scale from the largest magnitude of all rows."""
    encode_scale = 1 / (rows.float().abs().max() * factor)
    products = nvfp4.fake_quant(rows, encode_scale=encode_scale)
    return products, encode_scale.reciprocal().expand(rows.shape[0])


@contracts
def test_a_row_scaled_by_a_thousand_leaves_every_other_rows_bits(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    monkeypatch: pytest.MonkeyPatch,
    quantization: Quantization,
    activations: Activations,
) -> None:
    spec = make_spec()
    layer = make_layer(spec, make_quant(quantization, activations))
    hidden, ids, weights = make_tokens(spec, 16)
    louder = hidden.clone()
    louder[5] *= 1000
    others = torch.arange(16) != 5

    def changed() -> int:
        before, after = layer(hidden, ids, weights), layer(louder, ids, weights)
        assert not torch.equal(before[5], after[5])
        return int((before[others] != after[others]).any(1).sum())

    assert changed() == 0
    if activations is TOKEN:
        monkeypatch.setattr(nvfp4, "fake_quant_per_token", dynamic_per_tensor)
        assert changed() == 15


@pytest.mark.parametrize(("quantization", "activations"), QUANTIZED[:2])
def test_a_quantized_rows_result_does_not_depend_on_the_batch(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """Sums of NVFP4 products are exact in FP32, so a GEMM of another shape gives the same bits."""
    spec = make_spec()
    layer = make_layer(spec, make_quant(quantization, activations))
    hidden, ids, weights = make_tokens(spec, 16)
    together = layer(hidden, ids, weights)
    for row in range(16):
        one = slice(row, row + 1)
        assert torch.equal(layer(hidden[one], ids[one], weights[one])[0], together[row])


@contracts
@pytest.mark.parametrize("has_bias", [False, True])
def test_no_tokens_give_no_rows_and_one_expert_may_take_all(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    make_matrices: Any,
    stage: Any,
    quantization: Quantization,
    activations: Activations,
    has_bias: bool,
) -> None:
    """All tokens on expert 2, in both slots: twice the row, half the weight each."""
    spec, quant = make_spec(has_bias=has_bias), make_quant(quantization, activations)
    matrices = make_matrices(spec)
    biases = {key: value[:, 0] for key, value in matrices.items()} if has_bias else None
    layer = make_layer(spec, quant, stage(spec, quant, matrices, biases=biases))
    hidden, ids, weights = make_tokens(spec, 8)
    assert layer(hidden[:0], ids[:0], weights[:0]).shape == (0, 64)
    crowd, half = torch.full_like(ids, 2), torch.full_like(weights, 0.5)
    alone = layer(
        hidden, torch.tensor([[2, 0]]).expand(8, 2), torch.tensor([[1.0, 0.0]]).expand(8, 2)
    )
    assert torch.equal(layer(hidden, crowd, half), alone)
    assert alone.abs().max() > 0.1


@contracts
def test_the_shares_of_two_ranks_add_up_to_the_whole(
    make_spec: Any,
    make_quant: Any,
    make_experts: Any,
    make_layer: Any,
    make_tokens: Any,
    make_matrices: Any,
    stage: Any,
    quantization: Quantization,
    activations: Activations,
) -> None:
    spec, quant = make_spec(dtype=torch.float32), make_quant(quantization, activations)
    hidden, ids, weights = make_tokens(spec, 12)
    whole = make_layer(spec, quant)(hidden, ids, weights)
    total = torch.zeros_like(whole)
    for first in (0, 1):
        share = replace(spec, num_local_experts=1 if first == 0 else 3, first_local_expert=first)
        runner = ReferenceRunner(share, make_experts(quant), quant, ignored=False)
        weight_slots = runner.pack(stage(share, quant, make_matrices(share)))
        scratch = {name: need.empty() for name, need in runner.scratch_specs().items()}
        for buffer in scratch.values():
            buffer.fill_(torch.nan)  # what nobody wrote must not be read
        x = Dispatched(hidden, None, Routing(ids.int(), weights))
        part = runner.run(x, weights=weight_slots, scratch=scratch)
        elsewhere = ((ids < first) | (ids >= first + share.num_local_experts)).all(1)
        assert elsewhere.any() or first == 1
        assert torch.equal(part[elsewhere], torch.zeros_like(part[elsewhere]))
        assert not part[elsewhere].signbit().any()
        total += part
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)


def test_ids_that_no_rank_has_contribute_nothing(
    make_spec: Any, make_quant: Any, make_layer: Any, make_tokens: Any
) -> None:
    spec = make_spec()
    layer = make_layer(spec, make_quant(ONLINE))
    hidden, ids, weights = make_tokens(spec, 4)
    padded = ids.clone()
    padded[1], padded[3, 0] = -1, 4
    output = layer(hidden, padded, weights)
    assert torch.equal(output[::2], layer(hidden, ids, weights)[::2])
    assert output[1].tolist() == [0.0] * 64
    assert not output[1].signbit().any()
    without = torch.tensor([[0.0, float(weights[3, 1])]])
    assert torch.equal(output[3:], layer(hidden[3:], ids[3:], without))


@pytest.mark.parametrize(("quantization", "activations"), [(MODELOPT, a) for a in Activations])
def test_gate_and_up_keep_scales_of_their_own(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_matrices: Any,
    make_tokens: Any,
    serialize: Any,
    stage: Any,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """Up enters once, so four times its scale is four times the output; the gate's is not.

    Four is a power of two: it moves exponents only. The input scale leaves room for that.
    """
    spec, quant = make_spec(), make_quant(quantization, activations)
    encoded = {key: serialize(value) for key, value in make_matrices(spec).items()}
    if activations is TENSOR:
        encoded = {k: replace(v, input_scale=torch.tensor(0.1)) for k, v in encoded.items()}
    experts = stage(spec, quant, encoded)
    tokens = make_tokens(spec, 8)
    base = make_layer(spec, quant, experts)(*tokens)
    outputs = [
        make_layer(
            spec,
            quant,
            replace(experts, gate_up_global_scale=experts.gate_up_global_scale * torch.tensor(by)),
        )(*tokens)
        for by in ([1.0, 4.0], [4.0, 1.0])
    ]
    error = (outputs[0] - 4 * base).float().norm() / (4 * base).float().norm()
    assert error == 0
    assert (outputs[1] - 4 * base).float().norm() / (4 * base).float().norm() > 0.1


@pytest.mark.parametrize(("quantization", "activations"), QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoded_cache_changes_no_bit(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    quantization: Quantization,
    activations: Activations,
    dtype: torch.dtype,
) -> None:
    spec, quant = make_spec(dtype=dtype), make_quant(quantization, activations)
    cached, packed = (make_layer(spec, quant, decoded_cache=cache) for cache in (True, False))
    tokens = make_tokens(spec, 9)
    assert torch.equal(cached(*tokens), packed(*tokens))
    products = nvfp4.decode_exact_products(
        packed.weights["down"], packed.weights["down_block_scale"], dtype=torch.float32
    )
    assert torch.equal(cached.weights["down_decoded"].float(), products.mT)
    assert set(cached.weights) - set(packed.weights) == {"gate_up_decoded", "down_decoded"}


@contracts
def test_loading_a_then_b_then_a_gives_as_output_in_place(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_matrices: Any,
    make_tokens: Any,
    stage: Any,
    quantization: Quantization,
    activations: Activations,
) -> None:
    """No address moves, the cache is never stale: B's output is that of a fresh layer of B."""
    spec, quant = make_spec(), make_quant(quantization, activations)
    a, b = (stage(spec, quant, make_matrices(spec, seed)) for seed in (1, 2))
    tokens = make_tokens(spec, 8)
    layer = make_layer(spec, quant, a)
    first, addresses = layer(*tokens), layer.weights.addresses()
    layer.load(b, Journal(keeps=False))
    second = layer(*tokens)
    assert torch.equal(second, make_layer(spec, quant, b)(*tokens))
    assert not torch.equal(first, second)
    layer.load(a, Journal(keeps=False))
    assert torch.equal(layer(*tokens), first)
    assert layer.weights.addresses() == addresses


def test_more_rows_than_the_budget_name_the_term_that_set_it(
    make_spec: Any, make_quant: Any, make_layer: Any, make_tokens: Any
) -> None:
    layer = make_layer(make_spec(), make_quant(ONLINE), rows=8)
    assert layer(*make_tokens(make_spec(), 8)).shape == (8, 64)
    with pytest.raises(CapacityExceeded, match="9 rows and has room for 8") as refused:
        layer(*make_tokens(make_spec(), 9))
    assert "the test's own limit" in refused.value.why


def test_the_intermediate_is_rounded_to_the_models_dtype(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_tokens: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Per token it exists in BF16; a fused static epilogue quantizes the FP32 result."""
    spec = make_spec()
    for quantization, activations, dtype in (
        (ONLINE, TOKEN, torch.bfloat16),
        (MODELOPT, TENSOR, torch.float32),
    ):
        spy = Spy(monkeypatch)
        make_layer(spec, make_quant(quantization, activations))(*make_tokens(spec, 4))
        assert spy.calls[1][0].dtype == dtype
        monkeypatch.undo()


def test_sizes_that_have_no_groups_of_16_are_refused(
    make_spec: Any, make_quant: Any, make_experts: Any
) -> None:
    spec, quant = make_spec(intermediate_size=24), make_quant(ONLINE)
    with pytest.raises(Unsupported, match="64 x 24"):
        ReferenceRunner(spec, make_experts(quant), quant, ignored=False)
    plain = ReferenceRunner(spec, make_experts(quant), quant, ignored=True)
    assert set(plain.weight_specs()) == {"gate_up", "down"}


def test_experts_of_the_other_form_are_refused(
    make_spec: Any, make_quant: Any, make_experts: Any, make_matrices: Any, stage: Any
) -> None:
    spec, quant = make_spec(), make_quant(ONLINE)
    runner = ReferenceRunner(spec, make_experts(quant), quant, ignored=True)
    with pytest.raises(TypeError, match="CanonicalExperts"):
        runner.pack(stage(spec, quant, make_matrices(spec)))


def test_every_slot_that_is_declared_is_packed(
    make_spec: Any, make_quant: Any, make_experts: Any, make_matrices: Any, stage: Any
) -> None:
    spec = make_spec()
    for quantization, activations in CONTRACTS:
        quant = make_quant(quantization, activations)
        runner = ReferenceRunner(spec, make_experts(quant), quant, ignored=False)
        table = SlotTable()
        for name, need in runner.weight_specs().items():
            table.allocate(name, need)
        packed = runner.pack(stage(spec, quant, make_matrices(spec)))
        assert set(packed) == set(table)
        for name, value in packed.items():
            table.write_(name, value)
            assert torch.equal(table[name], value)


@contracts
@pytest.mark.parametrize("has_bias", [False, True])
def test_unpacking_gives_back_what_was_packed_bit_for_bit(
    make_spec: Any,
    make_quant: Any,
    make_layer: Any,
    make_matrices: Any,
    stage: Any,
    quantization: Quantization,
    activations: Activations,
    *,
    has_bias: bool,
) -> None:
    spec, quant = make_spec(has_bias=has_bias), make_quant(quantization, activations)
    biases = None
    if has_bias:
        keys = itertools.product(spec.parts, range(spec.num_experts))
        biases = {(p, e): torch.full((spec.shape_of(p)[0],), 0.1 * e + 0.01) for p, e in keys}
    experts = stage(spec, quant, make_matrices(spec, 3), biases=biases)
    back = make_layer(spec, quant, experts).canonical()
    assert type(back) is type(experts)
    for field in dataclasses.fields(experts):
        ours, theirs = getattr(experts, field.name), getattr(back, field.name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert digest(ours) == digest(theirs), field.name
