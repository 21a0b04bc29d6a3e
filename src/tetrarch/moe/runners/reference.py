# SPDX-License-Identifier: Apache-2.0
"""The experts in torch, on the CPU or a GPU: what every other runner must equal.

    rows -> round -> GEMM 1 -> scale, bias, activation -> round -> GEMM 2 -> scale, bias -> finalize

Rounding and scaling per contract (numerics: 10):

* per_token: each row gets its own scale, which multiplies that row's accumulator before the
  activation. The activation result is rounded to the model's dtype, then quantized per row again.
* per_tensor: one static scale per GEMM, folded into the weight's global scale by `pack`. The
  second GEMM's input is quantized from the FP32 activation result, as a fused epilogue does;
  it never exists in BF16.
* bf16: rows stay as they are, weights are NVFP4 (W4A16) or plain; the activation result is
  rounded to the model's dtype.

Accumulators are FP32 in every case, and no row looks at another row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tetrarch.config.plan import ExpertPlan, QuantPlan
from tetrarch.core.errors import Unsupported
from tetrarch.core.specs import TensorSpec
from tetrarch.kernels.activation.reference import relu2, swiglu
from tetrarch.kernels.grouped_gemm.reference import grouped_gemm
from tetrarch.kernels.permute.reference import Permutation, finalize, permute
from tetrarch.moe.side import SideTensors
from tetrarch.moe.types import CanonicalExperts, Dispatched, ExpertSpec, PlainExperts
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import Activations
from tetrarch.numerics.scales import TOKEN_FACTOR

__all__ = ["ReferenceRunner"]

_FP32 = torch.float32


class ReferenceRunner:
    """Slots: packed codes and linear scales, folded scales, optionally decoded weights.

    A decoded weight is `code * block_scale`, which FP16 holds exactly, transposed to (E, K, O).
    Widening it for the FP32 GEMM costs less than reading an FP32 cache from memory saves: with
    six layers of 256 x 256 weights in turn, one row takes 15 us from FP16, 13 from FP32, 18 from
    BF16; without a cache 60 (torch 2.13, one core of a Sapphire Rapids Xeon).
    """

    def __init__(
        self, spec: ExpertSpec, experts: ExpertPlan, quant: QuantPlan, *, ignored: bool
    ) -> None:
        self._spec, self._budget, self._quant = spec, experts.budget, quant
        self._packed = quant.contract.quantizes_weights and not ignored
        self._cached = self._packed and experts.decoded_cache
        # Where one expert's (K, O) weight comes from.
        packed_source = _cached if self._cached else _decoded
        self._weight_of = packed_source if self._packed else _plain
        self._activations = quant.contract.activations if self._packed else Activations.BF16
        self._side = SideTensors.of(spec, self._activations, packed=self._packed)
        recipe = quant.activation_recipe
        self._factors = {
            "gate_up": recipe.token_factor if recipe else TOKEN_FACTOR,
            "down": quant.fc2_input_scale,
        }
        if self._packed and (spec.hidden_size % 16 or spec.intermediate_size % 16):
            raise Unsupported(
                f"NVFP4 experts of {spec.hidden_size} x {spec.intermediate_size}",
                why="16 neighbours share a scale, so both sizes must be multiples of 16",
                fix="--quantization none",
            )

    def weight_specs(self) -> Mapping[str, TensorSpec]:
        """Return the specs of E local experts: codes, scales, cache and biases where there are."""
        s, e = self._spec, self._spec.num_local_experts
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (out, width) in s.matrices.items():
            if self._packed:
                shapes[name] = ((e, out, width // 2), torch.uint8)
                shapes[f"{name}_block_scale"] = ((e, out, width // 16), torch.float8_e4m3fn)
            else:
                shapes[name] = ((e, out, width), s.dtype)
            if self._cached:
                shapes[f"{name}_decoded"] = ((e, width, out), torch.float16)
        specs = {name: TensorSpec(*shape, s.device) for name, shape in shapes.items()}
        return specs | self._side.specs()

    def scratch_specs(self) -> Mapping[str, TensorSpec]:
        """Rows in expert order: GEMM 1's input (GEMM 2's output reuses it) and its output.

        And one expert's weight, widened. Freeing a fresh piece of that size each time makes the
        allocator tidy up: 5 % of a decode step of the demo model.
        """
        s, rows = self._spec, self._budget.rows * self._spec.top_k
        return {
            "hidden_rows": TensorSpec((rows, s.hidden_size), _FP32, s.device),
            "gate_up_rows": TensorSpec((rows, s.num_up_rows), _FP32, s.device),
            "weight": TensorSpec((s.hidden_size * s.num_up_rows,), _FP32, s.device),
        }

    def pack(self, experts: CanonicalExperts | PlainExperts) -> Mapping[str, Tensor]:
        """Fold the static input scales into the weight scales, decode where a cache is kept."""
        packed = self._side.pack(experts) | {"gate_up": experts.gate_up, "down": experts.down}
        if isinstance(experts, CanonicalExperts):
            packed["gate_up_block_scale"] = experts.gate_up_block_scale
            packed["down_block_scale"] = experts.down_block_scale
            if self._cached:
                packed |= {f"{n}_decoded": _decode_all(packed, n) for n in ("gate_up", "down")}
        return packed

    def unpack(self, weights: Mapping[str, Tensor]) -> CanonicalExperts | PlainExperts:
        """Return what `pack` was given; folding rounds, so the folded scales are kept beside."""
        biases = self._side.biases(weights)
        if not self._packed:
            return PlainExperts(gate_up=weights["gate_up"], down=weights["down"], **biases)
        return CanonicalExperts(
            gate_up=weights["gate_up"],
            gate_up_block_scale=weights["gate_up_block_scale"],
            down=weights["down"],
            down_block_scale=weights["down_block_scale"],
            **self._side.scales(weights),
            **biases,
        )

    def run(
        self, x: Dispatched, *, weights: Mapping[str, Tensor], scratch: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the routed, weighted sums: (M, H) in the model's dtype."""
        self._budget.require(x.hidden.shape[0])
        ids, topk_weights = x.routing.topk_ids, x.routing.topk_weights
        s = self._spec
        order = permute(ids, first_expert=s.first_local_expert, num_experts=s.num_local_experts)
        num_rows = order.token.shape[0]
        if num_rows == 0:
            return torch.zeros_like(x.hidden)
        hidden_rows = scratch["hidden_rows"][:num_rows]
        gate_up_rows = scratch["gate_up_rows"][:num_rows]

        values, token_scale = self._round("gate_up", x.hidden, weights)
        torch.index_select(values, 0, order.token, out=hidden_rows)
        row_scale = None if token_scale is None else token_scale.index_select(0, order.token)
        weight = partial(self._weight, weights, "gate_up", room=scratch["weight"])
        grouped_gemm(hidden_rows, order.counts, weight=weight, out=gate_up_rows)
        self._scale("gate_up", gate_up_rows, order, weights=weights, row_scale=row_scale)

        values, row_scale = self._round("down", self._activate(gate_up_rows), weights)
        weight = partial(self._weight, weights, "down", room=scratch["weight"])
        grouped_gemm(values, order.counts, weight=weight, out=hidden_rows)
        self._scale("down", hidden_rows, order, weights=weights, row_scale=row_scale)
        return finalize(hidden_rows, order, topk_weights=topk_weights, dtype=x.hidden.dtype)

    def _round(
        self, gemm: str, rows: Tensor, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a GEMM's FP32 operand, and the row scale that its result still lacks."""
        recipe = self._quant.activation_recipe
        if self._activations is Activations.PER_TOKEN:
            factor = self._factors[gemm]
            return nvfp4.fake_quant_per_token(rows, factor=factor, recipe=recipe)
        if self._activations is Activations.PER_TENSOR:
            recipe = None if gemm == "down" else recipe  # the fused epilogue knows no 4-over-6
            encode_scale = weights[f"{gemm}_encode_scale"]
            return nvfp4.fake_quant(rows, encode_scale=encode_scale, recipe=recipe), None
        return rows.float(), None

    def _weight(
        self, weights: Mapping[str, Tensor], name: str, expert: int, *, room: Tensor
    ) -> Tensor:
        """Return one expert's (K, O) fp32 weight, widened into `room` where it is narrower."""
        weight = self._weight_of(weights, name, expert)
        if weight.dtype == _FP32:
            return weight
        return room.as_strided(weight.shape, weight.stride()).copy_(weight)

    def _scale(
        self,
        name: str,
        rows: Tensor,
        order: Permutation,
        *,
        weights: Mapping[str, Tensor],
        row_scale: Tensor | None,
    ) -> None:
        """Finish accumulators in place: `z * (expert scale * row scale) + bias`."""
        if self._packed:
            factor = weights[f"{name}_scale"].index_select(0, order.expert)  # (N, 2 | 1)
            if row_scale is not None:
                factor = factor * row_scale.unsqueeze(1)
            rows.view(*factor.shape, -1).mul_(factor.unsqueeze(2))
        if self._spec.has_bias:
            rows.add_(weights[f"{name}_bias"].index_select(0, order.expert))

    def _activate(self, gate_up: Tensor) -> Tensor:
        """Return (N, I): FP32 per tensor, otherwise in the model's dtype."""
        a = self._spec.activation
        if a.gated:
            activated = swiglu(gate_up, alpha=a.alpha, beta=a.beta, limit=a.limit)
        else:
            activated = relu2(gate_up)
        fused = self._activations is Activations.PER_TENSOR
        return activated if fused else activated.to(self._spec.dtype)


def _cached(weights: Mapping[str, Tensor], name: str, expert: int) -> Tensor:
    return weights[f"{name}_decoded"][expert]


def _decoded(weights: Mapping[str, Tensor], name: str, expert: int) -> Tensor:
    block_scale = weights[f"{name}_block_scale"][expert]
    return nvfp4.decode_exact_products(weights[name][expert], block_scale, dtype=_FP32).mT


def _plain(weights: Mapping[str, Tensor], name: str, expert: int) -> Tensor:
    return weights[name][expert].mT


def _decode_all(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return (E, K, O) fp16, expert by expert, so that only one is held twice."""
    experts, out, width = weights[name].shape
    decoded = torch.empty(experts, 2 * width, out, dtype=torch.float16, device=weights[name].device)
    for expert, weight in enumerate(decoded):
        weight.copy_(_decoded(weights, name, expert))
    return decoded
