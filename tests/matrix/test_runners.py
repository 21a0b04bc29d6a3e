# SPDX-License-Identifier: Apache-2.0
"""Every row of the support table against an oracle in float64 that shares no code with it.

The oracle rounds by search in tables of all values instead of by arithmetic, multiplies in
float64, and follows `docs/numerics.md` line by line. Only the loading of weights is ours: what
the stager makes of a matrix is held to other projects' bytes in tests/moe.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tetrarch.config.hardware import Arch
from tetrarch.config.plan import ExpertPlan, QuantPlan, TokenBudget
from tetrarch.config.support import SUPPORT, Route
from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable
from tetrarch.moe.build import build_layer
from tetrarch.moe.experts import ExpertStager
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import (
    CanonicalExperts,
    ExpertActivation,
    ExpertSpec,
    Nvfp4Matrix,
    PlainExperts,
)
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import (
    WEIGHT_RECIPE,
    Activations,
    Quantization,
    SourceFormat,
    contract_for,
)

F32, F64 = np.float32, np.float64
Array = NDArray[np.floating]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Byte by byte: subnormals m * 2**-9, then (8 + m) * 2**(e - 10); 0x7F is NaN.
E4M3 = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][
        :127
    ]
)
FMAX = np.finfo(F32).max


def nearest(values: Array, table: Array) -> NDArray[np.intp]:
    """Return the index of the nearest entry; a tie goes to the even index; ends saturate."""
    distance = np.abs(np.asarray(values, F64)[..., None] - table)
    best = distance.min(-1, keepdims=True)
    candidates = distance == best
    even = candidates & (np.arange(len(table)) % 2 == 0)
    return np.where(even.any(-1), even.argmax(-1), candidates.argmax(-1))


def quantize(rows: Array, encode: Array) -> Array:
    """Section 4: code times block scale of FP32 rows, `encode` being () or (M, 1)."""
    blocks = rows.astype(F32).reshape(rows.shape[0], -1, 16)
    amax = np.abs(blocks).max(-1)
    encode = np.broadcast_to(np.asarray(encode, F32), (rows.shape[0], 1))
    scale = E4M3[nearest(amax * (encode * F32(1 / 6)), E4M3)].astype(F32)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(F32(1) / (scale * (F32(1) / encode)), FMAX)
        scaled = blocks * inverse[..., None]
    values = np.sign(scaled) * E2M1[nearest(np.abs(scaled), E2M1)]
    return (values * scale[..., None]).reshape(rows.shape)


def quantize_per_token(rows: Array, factor: float) -> tuple[Array, Array]:
    """Section 5: the same under a scale for each row, and those scales."""
    amax = np.abs(rows).astype(F32).max(-1, keepdims=True)
    encode = np.minimum(F32(1) / F32(factor) / amax, FMAX)
    return quantize(rows, encode), (F32(1) / encode)[:, 0]


def bf16(values: Array) -> Array:
    """Round FP32 to BF16, ties to even, by its bit pattern."""
    bits = np.asarray(values, F32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(F32)


def decode(codes: torch.Tensor, block_scale: torch.Tensor) -> Array:
    """Nibbles through the table, low one first, times the block's scale."""
    packed = codes.numpy()
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.where(nibbles < 8, 1, -1) * E2M1[nibbles % 8]
    return values * np.repeat(E4M3[block_scale.view(torch.uint8).numpy()], 16, axis=-1)


class Oracle:
    """One layer in float64, token by token and slot by slot."""

    def __init__(
        self, spec: ExpertSpec, quant: QuantPlan, experts: CanonicalExperts | PlainExperts
    ) -> None:
        self.activation, self.kind = spec.activation, quant.contract.activations
        self.factor = quant.fc2_input_scale
        num_columns = 2 if spec.activation.gated else 1
        if isinstance(experts, CanonicalExperts):
            self.gate_up = decode(experts.gate_up, experts.gate_up_block_scale)
            self.down = decode(experts.down, experts.down_block_scale)
            columns = experts.gate_up_global_scale.numpy()
            self.down_scale = experts.down_global_scale.numpy()
            self.encode = [F32(1) / experts.gate_up_input_scale.numpy()]
            self.encode.append(F32(1) / experts.down_input_scale.numpy())
            if self.kind is Activations.PER_TENSOR:
                columns, self.down_scale = (
                    columns / self.encode[0],
                    self.down_scale / self.encode[1],
                )
        else:
            self.gate_up, self.down = (w.double().numpy() for w in (experts.gate_up, experts.down))
            columns = np.ones((spec.num_experts, num_columns), F32)
            self.down_scale = np.ones(spec.num_experts, F32)
        self.gate_up_scale = np.repeat(columns, spec.intermediate_size, axis=1)
        bias = experts.gate_up_bias, experts.down_bias
        self.biases = [F32(0) if b is None else b.float().numpy() for b in bias]

    def round(self, rows: Array, gemm: int) -> tuple[Array, Array]:
        """Return a GEMM's input and its row factors under the contract."""
        ones = np.ones(rows.shape[0], F32)
        if self.kind is Activations.PER_TOKEN:
            return quantize_per_token(rows, (1 / 2688, self.factor)[gemm])
        if self.kind is Activations.PER_TENSOR:
            return quantize(rows, self.encode[gemm]), ones
        return rows, ones

    def activate(self, z: Array) -> Array:
        """Section 10.4 on float64 copies of FP32 accumulators."""
        z, a = z.astype(F64), self.activation
        if not a.gated:
            return np.maximum(z, 0) ** 2
        gate, up = np.split(z, 2, axis=-1)
        gate, up = np.minimum(gate, a.limit), np.clip(up, -a.limit, a.limit)
        return gate / (1 + np.exp(-a.alpha * gate)) * (up + a.beta)

    def __call__(self, hidden: Array, ids: Array, weights: Array) -> Array:
        total = np.zeros(hidden.shape, F32)
        x, token_scale = self.round(hidden, 0)
        for token, slot in np.ndindex(*ids.shape):
            e = int(ids[token, slot])
            factor = self.gate_up_scale[e] * token_scale[token]
            z = (self.gate_up[e] @ x[token]).astype(F32) * factor + self._bias(0, e)
            h = self.activate(z)[None].astype(F32)
            h, row_scale = self.round(h if self.kind is Activations.PER_TENSOR else bf16(h), 1)
            row = (self.down[e] @ h[0]).astype(F32) * (self.down_scale[e] * row_scale[0])
            total[token] += bf16(row + self._bias(1, e)) * weights[token, slot]
        return bf16(total)

    def _bias(self, gemm: int, expert: int) -> Array:
        bias = self.biases[gemm]
        return bias if bias.ndim == 0 else bias[expert]


KINDS = {
    "swiglu": ExpertActivation(),
    "clamped gate and bias": ExpertActivation(alpha=1.702, beta=1.0, limit=1.5),
    "relu2": ExpertActivation(gated=False),
}


def make_spec(kind: str) -> ExpertSpec:
    return ExpertSpec(
        num_experts=5,
        num_local_experts=5,
        first_local_expert=0,
        top_k=3,
        hidden_size=96,
        intermediate_size=48,
        activation=KINDS[kind],
        has_bias="bias" in kind,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def stage(
    spec: ExpertSpec, quant: QuantPlan, *, serialized: bool
) -> CanonicalExperts | PlainExperts:
    """Return random experts; serialized ones have a global scale for each matrix."""
    generator = torch.Generator().manual_seed(1)
    stager = ExpertStager(spec, quant)
    for expert in range(spec.num_experts):
        for part in spec.parts:
            matrix = torch.randn(spec.shape_of(part), generator=generator).mul(0.1).bfloat16()
            if serialized:
                encoded = nvfp4.encode_weight(matrix * (1 + expert), recipe=None)
                input_scale = torch.tensor(0.01 * (1 + expert))
                stager.put(part, expert, Nvfp4Matrix(*encoded, input_scale=input_scale))
            else:
                stager.put(part, expert, matrix)
            if spec.has_bias:
                stager.put_bias(part, expert, matrix[:, 0] * 5)
    return stager.finish()


def build(
    spec: ExpertSpec, route: Route, quant: QuantPlan, experts: CanonicalExperts | PlainExperts
) -> MoELayer:
    budget = TokenBudget(per_rank=32, rows=32, term="this test")
    plan = ExpertPlan(route=route, finalize=route.finalize[0], budget=budget, decoded_cache=False)
    device = torch.device("cpu" if Arch.CPU in route.archs else "cuda")
    layer = build_layer(replace(spec, device=device), plan, quant, scratch=SlotTable())
    there = {name: value if value is None else value.to(device) for name, value in fields(experts)}
    layer.load(replace(experts, **there), Journal(keeps=False))
    return layer


def fields(experts: CanonicalExperts | PlainExperts) -> list[tuple[str, torch.Tensor | None]]:
    return [(name, getattr(experts, name)) for name in experts.__dataclass_fields__]


ROWS = [
    pytest.param(
        route,
        quantization,
        id=f"{route.runner}-{route.dispatch}-{quantization}-{route.activations}",
        marks=() if Arch.CPU in route.archs else pytest.mark.gpu,
    )
    for route in SUPPORT
    for quantization in route.quantizations
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("route", "quantization"), ROWS)
def test_a_supported_row_equals_the_oracle(
    route: Route, quantization: Quantization, kind: str
) -> None:
    """Bit for bit; one output in a hundred may be off by one code of the intermediate.

    Sums are exact on both sides. Another exp may move a BF16 intermediate by one unit, and that
    may cross the border between two codes; with torch 2.13 on AVX-512 nothing differs at all.
    Negative control: the oracle with the next expert's down matrix is far off.
    """
    contract = contract_for(quantization, route.activations)
    assert contract is not None
    quant = QuantPlan(
        contract=contract,
        source=SourceFormat.BF16,
        ignored_layers=(),
        weight_recipe=WEIGHT_RECIPE,
        activation_recipe=None,
        fc2_input_scale=1 / 2688,
    )
    spec = make_spec(kind)
    experts = stage(spec, quant, serialized=SourceFormat.NVFP4_MODELOPT in contract.sources)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(24, spec.hidden_size, generator=generator)
    hidden = (hidden * torch.logspace(-3, 1, 24).unsqueeze(1)).bfloat16()  # rows of all sizes
    scores = torch.rand(24, spec.num_experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(spec.top_k)

    layer = build(spec, route, quant, experts)
    on = layer.weights["gate_up"].device
    ours = layer(hidden.to(on), ids.to(on), weights.to(on)).float().cpu().numpy()
    arguments = hidden.float().numpy(), ids.numpy(), weights.numpy()
    want = Oracle(spec, quant, experts)(*arguments)
    assert (ours == want).mean() > 0.99
    error, size = (np.linalg.norm(rows, axis=1) for rows in (ours - want, want))
    assert (error <= 0.01 * size).all()

    swapped = replace(experts, down=experts.down.roll(1, dims=0))
    wrong = Oracle(spec, quant, swapped)(*arguments)
    assert (ours == wrong).mean() < 0.2  # rows that a static scale flushes to zero agree anyway


def test_the_oracles_tables_are_those_of_the_formats() -> None:
    """Torch knows E4M3; E2M1's ties go to the even code."""
    bytes_ = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert bytes_.double().tolist() == E4M3.tolist()
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert E2M1[nearest(ties, E2M1)].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    sample = torch.randn(1000)
    assert bf16(sample.numpy()).tolist() == sample.bfloat16().float().tolist()
