# SPDX-License-Identifier: Apache-2.0
"""Expert layers to measure: random weights and uniform routing in the shapes of served models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrarch.config.plan import ExpertPlan, QuantPlan, TokenBudget
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.kernels.grouped_gemm.tiles import Tile, block_tokens, max_blocks, tile_for
from tetrarch.kernels.grouped_gemm.triton import Epilogue, Weight, grouped_gemm
from tetrarch.kernels.permute.triton import Alignment, align
from tetrarch.moe.runners.triton import TritonRunner
from tetrarch.moe.types import (
    CanonicalExperts,
    Dispatched,
    ExpertActivation,
    ExpertSpec,
    PlainExperts,
    Routing,
)
from tetrarch.numerics import nvfp4
from tetrarch.numerics.contract import (
    WEIGHT_RECIPE,
    Activations,
    Quantization,
    SourceFormat,
    contract_for,
)

__all__ = [
    "CONTRACTS",
    "SHAPES",
    "Layer",
    "Step",
    "decoded",
    "meta_step",
    "plans_of",
    "random_experts",
    "spec_of",
    "steps_of",
]

BF16 = torch.bfloat16
SHAPES = {  # experts, top-k, hidden, intermediate, gated
    "qwen3-30b": (128, 8, 2048, 768, True),
    "dsv3-ep8": (32, 8, 7168, 2048, True),
    "nemo3s": (512, 22, 1024, 2688, False),
}
CONTRACTS = {
    "W4A4": (Quantization.NVFP4_ONLINE, Activations.PER_TOKEN),
    "W4A16": (Quantization.NVFP4_ONLINE, Activations.BF16),
    "BF16": (Quantization.NONE, Activations.BF16),
}


def spec_of(name: str, device: str) -> ExpertSpec:
    """Return the geometry of a shape."""
    experts, top_k, hidden, inner, gated = SHAPES[name]
    return ExpertSpec(
        num_experts=experts,
        num_local_experts=experts,
        first_local_expert=0,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        activation=ExpertActivation(gated=gated),
        has_bias=False,
        dtype=BF16,
        device=torch.device(device),
    )


def plans_of(contract_name: str, tokens: int) -> tuple[ExpertPlan, QuantPlan]:
    """Return the plans of a contract with room for so many tokens."""
    contract = contract_for(*CONTRACTS[contract_name])
    assert contract is not None
    fits = (row for row in SUPPORT if row.activations is contract.activations)
    experts = ExpertPlan(
        route=next(row for row in fits if row.runner == "triton"),
        finalize=Finalize.SEPARATE,
        budget=TokenBudget(per_rank=tokens, rows=tokens, term="the largest M"),
        decoded_cache=False,
    )
    quant = QuantPlan(
        contract=contract,
        source=SourceFormat.BF16,
        ignored_layers=(),
        weight_recipe=WEIGHT_RECIPE,
        activation_recipe=None,
        fc2_input_scale=1 / 2688,
    )
    return experts, quant


def random_experts(spec: ExpertSpec) -> CanonicalExperts:
    """Return NVFP4 weights whose outputs are of the inputs' size."""
    e, u, h, i = spec.num_experts, spec.num_up_rows, spec.hidden_size, spec.intermediate_size
    on: dict[str, Any] = {"device": spec.device}

    def scales(*shape: int) -> Tensor:
        return (torch.rand(shape, **on) * 400 + 1).to(torch.float8_e4m3fn)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, **on)

    one = torch.ones((), **on)
    return CanonicalExperts(
        gate_up=codes(e, u, h // 2),
        gate_up_block_scale=scales(e, u, h // 16),
        gate_up_global_scale=(torch.rand(e, len(spec.parts) - 1, **on) + 0.5) * h**-0.5 / 600,
        down=codes(e, h, i // 2),
        down_block_scale=scales(e, h, i // 16),
        down_global_scale=(torch.rand(e, **on) + 0.5) * i**-0.5 / 600,
        gate_up_input_scale=one,
        down_input_scale=one,
    )


def decoded(experts: CanonicalExperts) -> PlainExperts:
    """Return the same weights in BF16."""

    def one(codes: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        weight = nvfp4.decode_exact_products(codes, scale, dtype=torch.float32)
        return (weight.view(len(factor), -1) * factor[:, None]).view_as(weight).to(BF16)

    gates = zip(experts.gate_up, experts.gate_up_block_scale, experts.gate_up_global_scale)  # noqa: B905
    downs = zip(experts.down, experts.down_block_scale, experts.down_global_scale)  # noqa: B905
    return PlainExperts(
        gate_up=torch.stack([one(*each) for each in gates]),
        down=torch.stack([one(c, s, g.view(1)) for c, s, g in downs]),
    )


@dataclass
class Step:
    """M tokens and where they go."""

    hidden: Tensor
    routing: Routing
    tokens: int  # of a block
    order: Alignment

    @classmethod
    def of(cls, spec: ExpertSpec, hidden: Tensor, routing: Routing, tokens: int) -> Step:
        slots, on = routing.topk_ids.numel(), {"device": spec.device}
        blocks = max_blocks(slots, spec.num_experts, tokens)
        order = Alignment(
            sorted_slots=torch.empty(blocks * tokens, dtype=torch.int32, **on),
            expert=torch.empty(blocks, dtype=torch.int32, **on),
            num_blocks=torch.empty(1, dtype=torch.int32, **on),
            owned=torch.empty(slots, dtype=torch.bool, **on),
        )
        align(
            routing.topk_ids,
            first_expert=0,
            num_experts=spec.num_experts,
            block_tokens=tokens,
            out=order,
        )
        return cls(hidden, routing, tokens, order)


def steps_of(spec: ExpertSpec, tokens: int, *, block: int | None = None) -> list[Step]:
    """Return steps to rotate through; small ones hit experts in turn, so that none is cached."""
    count = 16 if tokens <= 4 else 8 if tokens <= 256 else 2
    deck = torch.cat([torch.randperm(spec.num_experts) for _ in range(64)])
    steps: list[Step] = []
    for index in range(count):
        if spec.top_k * tokens <= spec.num_experts:
            many = spec.top_k * tokens
            ids = deck[index * many : (index + 1) * many].view(tokens, spec.top_k)
        else:
            ids = torch.rand(tokens, spec.num_experts).topk(spec.top_k).indices
        weights = torch.rand(tokens, spec.top_k).softmax(-1)
        routing = Routing(ids.int().to(spec.device), weights.to(spec.device))
        hidden = torch.randn(tokens, spec.hidden_size, dtype=BF16, device=spec.device)
        size = block or block_tokens(ids.numel(), spec.num_experts, packed=True)
        steps.append(Step.of(spec, hidden, routing, size))
    return steps


@dataclass
class Layer:
    """One contract's runner, and its GEMMs on their own."""

    spec: ExpertSpec
    contract: str
    runner: TritonRunner
    weights: dict[str, Tensor]
    scratch: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        spec: ExpertSpec,
        contract: str,
        tokens: int,
        experts: CanonicalExperts | PlainExperts | None,
    ) -> Layer:
        """Build it; without experts its weights are empty."""
        runner = TritonRunner(spec, *plans_of(contract, tokens), ignored=False)
        empty = {name: need.empty() for name, need in runner.weight_specs().items()}
        weights = empty if experts is None else dict(runner.pack(experts))
        scratch = {name: need.empty() for name, need in runner.scratch_specs().items()}
        return cls(spec, contract, runner, weights, scratch)

    def __call__(self, step: Step) -> Tensor:
        arrived = Dispatched(step.hidden, None, step.routing)
        return self.runner.run(arrived, weights=self.weights, scratch=self.scratch)

    def gemm(self, name: str, step: Step, tile: Tile | None = None) -> None:
        """Run one of the GEMMs in W4A16 or BF16, with the activation where it has one."""
        packed, slots = self.contract != "BF16", step.routing.topk_ids.numel()
        activated = self.scratch["activated"][:slots]
        first, gated = name == "gate_up", self.spec.activation.gated
        rows = step.hidden if first else activated
        out = activated if first else self.scratch["down_rows"][:slots]
        weight = Weight(
            words=self.weights[name],
            block_scale=self.weights[f"{name}_block_scale"] if packed else None,
            scale=self.weights[f"{name}_scale"] if packed else None,
            bias=None,
            num_rows=self.spec.matrices[name][0],
        )
        tile = tile or tile_for(step.tokens, rows.shape[1], packed=packed, dtype=BF16, ptx=True)
        activation = ("swiglu" if gated else "relu2") if first else "none"
        after = Epilogue(out=out, activation=activation)
        grouped_gemm(rows, weight, order=step.order, tile=tile, epilogue=after)

    def gemms(self, step: Step) -> None:
        """Run both."""
        self.gemm("gate_up", step)
        self.gemm("down", step)


def meta_step(name: str, m: int, block: int | None) -> Step:
    """Return a step of tensors without memory."""
    spec, on = spec_of(name, "meta"), {"device": "meta"}
    ids = torch.empty(m, spec.top_k, dtype=torch.int32, **on)
    routing = Routing(ids, torch.empty(m, spec.top_k, **on))
    hidden = torch.empty(m, spec.hidden_size, dtype=BF16, **on)
    size = block or block_tokens(ids.numel(), spec.num_experts, packed=True)
    return Step.of(spec, hidden, routing, size)
