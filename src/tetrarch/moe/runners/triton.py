# SPDX-License-Identifier: Apache-2.0
"""The experts in Triton: portable over NVIDIA GPUs, nothing waits for the host.

    align -> round -> GEMM 1, activation -> round -> GEMM 2 -> finalize

Rounding and scaling are the reference runner's, stage by stage. A W4A4 GEMM multiplies exact BF16
products `code * block_scale` and finishes with the FP32 scales, as Blackwell's tensor cores do, so
that only the order of sums is its own. Four launches a layer, six where rows are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tetrarch.config.plan import ExpertPlan, QuantPlan
from tetrarch.config.support import Finalize
from tetrarch.core.errors import Unsupported
from tetrarch.core.specs import TensorSpec
from tetrarch.kernels.grouped_gemm import packing
from tetrarch.kernels.grouped_gemm.tiles import BLOCK_TOKENS, block_tokens, max_blocks, tile_for
from tetrarch.kernels.grouped_gemm.triton import Epilogue, Weight, grouped_gemm
from tetrarch.kernels.permute.triton import Alignment, align, counts_size, finalize
from tetrarch.kernels.quantize.triton import round_rows
from tetrarch.moe.side import SideTensors
from tetrarch.moe.types import CanonicalExperts, Dispatched, ExpertSpec, PlainExperts
from tetrarch.numerics.contract import Activations
from tetrarch.numerics.scales import TOKEN_FACTOR

__all__ = ["TritonRunner"]

_FP32 = torch.float32


class TritonRunner:
    """Slots: words of four codes and of four scales (`kernels.grouped_gemm.packing`), or weights.

    Gate and up alternate every 8 rows, so that one thread of the first GEMM holds both of a pair
    and activates it before anything is stored.
    """

    def __init__(
        self, spec: ExpertSpec, experts: ExpertPlan, quant: QuantPlan, *, ignored: bool
    ) -> None:
        self._spec, self._budget, self._quant = spec, experts.budget, quant
        self._fuses = experts.finalize is Finalize.FUSED
        self._packed = quant.contract.quantizes_weights and not ignored
        self._activations = quant.contract.activations if self._packed else Activations.BF16
        self._side = SideTensors.of(spec, self._activations, packed=self._packed)
        self._rounds = self._activations is not Activations.BF16
        recipe = quant.activation_recipe
        self._factors = {
            "gate_up": recipe.token_factor if recipe else TOKEN_FACTOR,
            "down": quant.fc2_input_scale,
        }
        if spec.hidden_size % 16 or spec.intermediate_size % 16:
            raise Unsupported(
                f"experts of {spec.hidden_size} x {spec.intermediate_size} in the triton runner",
                why="16 neighbours share a scale, and a thread holds rows of gate and up by 16, "
                "so both sizes must be multiples of 16",
                fix="--quantization none --moe-runner reference",
            )

    def weight_specs(self) -> Mapping[str, TensorSpec]:
        """Return the specs of E local experts, rows padded to 128 and columns to 64."""
        s, e = self._spec, self._spec.num_local_experts
        specs = self._side.specs()
        for name, (out, width) in s.matrices.items():
            n, k = packing.padded(out, width)
            if self._packed:
                blocks = k // packing.K_BLOCK
                specs[name] = TensorSpec((e, blocks, n, 16), torch.int16, s.device)
                specs[f"{name}_block_scale"] = TensorSpec((e, blocks, n), torch.int32, s.device)
            else:
                specs[name] = TensorSpec((e, n, k), s.dtype, s.device)
        return specs

    def scratch_specs(self) -> Mapping[str, TensorSpec]:
        """Lists of slots, and each stage's rows, for the largest forward."""
        s, rows = self._spec, self._budget.rows
        slots, e = rows * s.top_k, s.num_local_experts
        fused = self._activations is Activations.PER_TENSOR  # rounded straight from FP32
        blocks = {tokens: max_blocks(slots, e, tokens) for tokens in BLOCK_TOKENS}
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "sorted_slots": ((max(n * t for t, n in blocks.items()),), torch.int32),
            "block_expert": ((max(blocks.values()),), torch.int32),
            "num_blocks": ((1,), torch.int32),
            "owned": ((slots,), torch.bool),
            "expert_counts": ((counts_size(slots, e),), torch.int32),
            "activated": ((slots, s.intermediate_size), _FP32 if fused else s.dtype),
        }
        if self._rounds:
            shapes["gate_up_values"] = ((rows, s.hidden_size), torch.bfloat16)
            shapes["down_values"] = ((slots, s.intermediate_size), torch.bfloat16)
        if self._activations is Activations.PER_TOKEN:
            shapes["gate_up_token_scale"] = ((rows,), _FP32)
            shapes["down_token_scale"] = ((slots,), _FP32)
        if self._fuses:
            shapes["sums"] = ((rows, s.hidden_size), _FP32)
        else:
            shapes["down_rows"] = ((slots, s.hidden_size), s.dtype)
        return {name: TensorSpec(*shape, s.device) for name, shape in shapes.items()}

    def pack(self, experts: CanonicalExperts | PlainExperts) -> Mapping[str, Tensor]:
        """Alternate gate and up, and put codes and scales where the kernel's bits want them."""
        packed = self._side.pack(experts)
        mix = packing.interleave if self._spec.activation.gated else _same
        if isinstance(experts, PlainExperts):
            packed["gate_up"] = packing.pack_plain(mix(experts.gate_up))
            packed["down"] = packing.pack_plain(experts.down)
            return packed
        scales = mix(experts.gate_up_block_scale.view(torch.uint8)).view(torch.float8_e4m3fn)
        packed["gate_up"] = packing.pack_codes(mix(experts.gate_up))
        packed["gate_up_block_scale"] = packing.pack_scales(scales)
        packed["down"] = packing.pack_codes(experts.down)
        packed["down_block_scale"] = packing.pack_scales(experts.down_block_scale)
        return packed

    def unpack(self, weights: Mapping[str, Tensor]) -> CanonicalExperts | PlainExperts:
        """Return what `pack` was given, bit for bit."""
        part = packing.separate if self._spec.activation.gated else _same
        biases = self._side.biases(weights)
        if not self._packed:
            gate_up = part(self._unpacked(packing.unpack_plain, weights, "gate_up"))
            down = self._unpacked(packing.unpack_plain, weights, "down")
            return PlainExperts(gate_up=gate_up, down=down, **biases)
        scales = self._unpacked(packing.unpack_scales, weights, "gate_up", "_block_scale")
        return CanonicalExperts(
            gate_up=part(self._unpacked(packing.unpack_codes, weights, "gate_up")),
            gate_up_block_scale=part(scales.view(torch.uint8)).view(torch.float8_e4m3fn),
            down=self._unpacked(packing.unpack_codes, weights, "down"),
            down_block_scale=self._unpacked(packing.unpack_scales, weights, "down", "_block_scale"),
            **self._side.scales(weights),
            **biases,
        )

    def _unpacked(
        self,
        unpack: Callable[..., Tensor],
        weights: Mapping[str, Tensor],
        name: str,
        suffix: str = "",
    ) -> Tensor:
        rows, width = self._spec.matrices[name]
        return unpack(weights[name + suffix], rows=rows, width=width)

    def run(
        self, x: Dispatched, *, weights: Mapping[str, Tensor], scratch: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the routed, weighted sums: (M, H) in the model's dtype."""
        rows, topk_weights = x.hidden.shape[0], x.routing.topk_weights
        self._budget.require(rows)
        out = torch.empty_like(x.hidden)
        if rows == 0:
            return out
        s, slots = self._spec, rows * self._spec.top_k
        tokens = block_tokens(slots, s.num_local_experts, packed=self._packed)
        order = self._align(x.routing.topk_ids, tokens, scratch=scratch)

        def multiply(name: str, operand: Tensor, epilogue: Epilogue) -> None:
            values, row_scale = self._round(name, operand, weights=weights, scratch=scratch)
            tile = tile_for(
                tokens,
                values.shape[1],
                packed=self._packed,
                dtype=values.dtype,
                ptx=s.device.type != "cpu",  # the interpreter's
            )
            weight = self._weight(name, weights)
            grouped_gemm(
                values, weight, order=order, tile=tile, epilogue=epilogue, row_scale=row_scale
            )

        activated = scratch["activated"][:slots]
        multiply("gate_up", x.hidden, self._activation(activated))
        if self._fuses:
            sums = scratch["sums"][:rows].zero_()
            fused = Epilogue(out=sums, topk_weights=topk_weights, round_to=s.dtype)
            multiply("down", activated, fused)
            return out.copy_(sums)
        down_rows = scratch["down_rows"][:slots]
        multiply("down", activated, Epilogue(out=down_rows))
        finalize(down_rows, topk_weights=topk_weights, owned=order.owned, out=out)
        return out

    def _align(self, topk_ids: Tensor, tokens: int, *, scratch: Mapping[str, Tensor]) -> Alignment:
        s, slots = self._spec, topk_ids.numel()
        order = Alignment(
            sorted_slots=scratch["sorted_slots"],
            expert=scratch["block_expert"],
            num_blocks=scratch["num_blocks"],
            owned=scratch["owned"][:slots],
            counts=scratch["expert_counts"],
        )
        align(
            topk_ids,
            first_expert=s.first_local_expert,
            num_experts=s.num_local_experts,
            block_tokens=tokens,
            out=order,
        )
        return order

    def _round(
        self,
        gemm: str,
        rows: Tensor,
        *,
        weights: Mapping[str, Tensor],
        scratch: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return a GEMM's operand, and the row scale that its result still lacks."""
        if not self._rounds:
            return rows, None
        recipe, count = self._quant.activation_recipe, rows.shape[0]
        values = scratch[f"{gemm}_values"][:count]
        if self._activations is Activations.PER_TOKEN:
            scale = scratch[f"{gemm}_token_scale"][:count]
            factor = self._factors[gemm]
            round_rows(rows, values=values, token_scale=scale, factor=factor, recipe=recipe)
            return values, scale
        recipe = None if gemm == "down" else recipe  # the fused epilogue knows no 4-over-6
        encode_scale = weights[f"{gemm}_encode_scale"]
        round_rows(rows, values=values, encode_scale=encode_scale, recipe=recipe)
        return values, None

    def _weight(self, name: str, weights: Mapping[str, Tensor]) -> Weight:
        return Weight(
            words=weights[name],
            block_scale=weights[f"{name}_block_scale"] if self._packed else None,
            scale=weights[f"{name}_scale"] if self._packed else None,
            bias=weights[f"{name}_bias"] if self._spec.has_bias else None,
            num_rows=self._spec.matrices[name][0],
        )

    def _activation(self, out: Tensor) -> Epilogue:
        a = self._spec.activation
        if not a.gated:
            return Epilogue(out=out, activation="relu2")
        return Epilogue(out=out, activation="swiglu", alpha=a.alpha, beta=a.beta, limit=a.limit)


def _same(tensor: Tensor) -> Tensor:
    return tensor
