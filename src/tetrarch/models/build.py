# SPDX-License-Identifier: Apache-2.0
"""A plan becomes a model: the transformers class on `meta`, our parts swapped in, memory given."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tetrarch.attention.layer import CONTEXT, LatentTap, PagedAttention
from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.config.patterns import matches
from tetrarch.config.plan import Plan, QuantPlan
from tetrarch.core.errors import CheckpointError
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena
from tetrarch.memory.slots import SlotTable
from tetrarch.models.names import NamePlan
from tetrarch.models.norms import fuse_norms
from tetrarch.models.onednn import is_small, without_onednn
from tetrarch.models.skeleton import ExpertSite, read_skeleton, swap_module
from tetrarch.moe.build import build_layer
from tetrarch.moe.layer import MoELayer
from tetrarch.moe.types import ExpertSpec

__all__ = ["Forward", "Model", "build_model"]

# The routers' balancing bias is added to scores in (0, 1) and BF16 would round it to 1/256;
# DeepSeek-V3's class declares it FP32, MiniMax-M2's does not.
_ALWAYS_FP32 = ("e_score_correction_bias",)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What one forward yields.

    Attributes:
        logits: (L, V), of the rows asked for.
        hidden: (T, H) after the final norm, of all rows; `None` unless it was asked for.
    """

    logits: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A built model. `load_weights` fills it, and refills it, in place.

    Attributes:
        hf: The Hugging Face model with our experts and our attention.
        names: Where checkpoint names go.
        experts: Path of each expert module to the layer that replaced it.
        ignored: Those of them that run unquantized, by `--fp4-ignored-layers`.
        sites: The attention layers, in the order of the KV pool.
        weights: Every other parameter and persistent buffer, under its Hugging Face name; the
            model's parameters share this storage, whose address never changes.
        scratch: Buffers that the expert layers share.
        dtype: Of hidden states, keys and values.
        device: Where everything is.
        vocab_size: Width of the logits.
    """

    hf: PreTrainedModel
    names: NamePlan
    experts: Mapping[str, MoELayer]
    ignored: frozenset[str]
    sites: tuple[AttentionSite, ...]
    weights: SlotTable
    scratch: SlotTable
    dtype: torch.dtype
    device: torch.device
    vocab_size: int

    @cached_property
    def _site_of(self) -> Mapping[nn.Module, AttentionSite]:
        return {self.hf.get_submodule(site.name): site for site in self.sites}

    @cached_property
    def _is_latent(self) -> bool:
        return any(site.latent for site in self.sites)

    @cached_property
    def _is_small(self) -> bool:
        return is_small(self.hf)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
        *,
        wants_hidden: bool = False,
    ) -> Forward:
        """Compute one step of a flattened batch; writes its keys and values to the pool.

        Args:
            token_ids: (T,) int64, sequence after sequence.
            positions: (T,) int64, of each token in its own sequence.
            attn: Which rows are whose, and where their pages are.
            pool: The pages.
            logits_at: (L,) int64, rows whose logits are wanted.
            wants_hidden: Return hidden states as well.

        Returns:
            Logits and, if asked for, hidden states, in the model's dtype.
        """
        tap = LatentTap() if self._is_latent else None
        context = PagedAttention(attn, pool, sites=self._site_of, tap=tap)
        alone = len(token_ids) == 1 and self._is_small
        kept: list[Tensor] = []
        with (
            without_onednn() if alone else nullcontext(),
            _hidden_kept(self.hf.base_model, kept) if wants_hidden else nullcontext(),
        ):
            output = self.hf(
                input_ids=token_ids[None],
                position_ids=positions[None],
                past_key_values=tap,
                use_cache=False,
                logits_to_keep=logits_at,
                **{CONTEXT: context},
            )
        return Forward(output.logits[0], kept[0] if wants_hidden else None)


@contextmanager
def _hidden_kept(base: nn.Module, kept: list[Tensor]) -> Generator[None]:
    """Put into `kept` what the body of the model hands to its head."""

    def keep(_module: nn.Module, _arguments: object, output: Any) -> None:
        kept.append(output.last_hidden_state[0])

    hook = base.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def build_model(
    plan: Plan, *, device: torch.device | None = None, arena: Arena | None = None
) -> Model:
    """Build the model of a plan, with memory for its weights but nothing in it.

    Args:
        plan: Model, contract and expert plan are read.
        device: Where to build it; the plan's own device by default.
        arena: Where all weights live, if they are to be released and resumed. Scratch, and what
            is computed from the configuration alone, live elsewhere.

    Raises:
        CheckpointError: The model is not one we can serve.
        Unsupported: Its expert geometry does not fit the runner.
    """
    device = device or torch.device(plan.device.torch_device)
    dtype: torch.dtype = getattr(torch, plan.model.dtype)
    skeleton = read_skeleton(plan.model.path, dtype=dtype)
    ignored = frozenset(
        site.path for site in skeleton.experts if _is_ignored(site.path, plan.quant, skeleton.names)
    )
    fuse_norms(skeleton.model, dtype=dtype, device=device)
    scratch = SlotTable()
    layers: dict[str, MoELayer] = {}
    for site in skeleton.experts:
        spec = _expert_spec(site, dtype=dtype, device=device)
        layers[site.path] = build_layer(
            spec,
            plan.experts,
            plan.quant,
            scratch=scratch,
            ignored=site.path in ignored,
            arena=arena,
        )
        swap_module(skeleton.model, site.path, layers[site.path])
    weights = _materialise(skeleton.model, SlotTable(arena), dtype=dtype, device=device)
    _shorten_lookups(skeleton.model)
    return Model(
        hf=skeleton.model,
        names=skeleton.names,
        experts=layers,
        ignored=ignored,
        sites=skeleton.attention,
        weights=weights,
        scratch=scratch,
        dtype=dtype,
        device=device,
        vocab_size=plan.model.facts.vocab_size,
    )


def _expert_spec(site: ExpertSite, *, dtype: torch.dtype, device: torch.device) -> ExpertSpec:
    return ExpertSpec(
        num_experts=site.shape.num_experts,
        num_local_experts=site.shape.num_experts,
        first_local_expert=0,
        top_k=site.top_k,
        hidden_size=site.shape.hidden_size,
        intermediate_size=site.shape.intermediate_size,
        activation=site.shape.activation,
        has_bias=site.shape.has_bias,
        dtype=dtype,
        device=device,
    )


def _is_ignored(path: str, quant: QuantPlan, names: NamePlan) -> bool:
    """Whether a pattern names the layer, by its path in transformers or in the checkpoint."""
    if not quant.contract.quantizes_weights:
        return False
    patterns = {form for p in quant.ignored_layers for form in (p, names.module_path(p))}
    return any(matches(pattern, path) for pattern in patterns)


def _materialise(
    model: PreTrainedModel, weights: SlotTable, *, dtype: torch.dtype, device: torch.device
) -> SlotTable:
    """Give every dense parameter and buffer its memory; ours already have theirs."""
    islands = _fp32_islands(model, dtype)
    persistent = model.state_dict().keys()
    given: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is given memory once

    def slot(name: str, meta: Tensor) -> Tensor:
        own = torch.float32 if islands.search(name) else meta.dtype
        return weights.allocate(name, TensorSpec(tuple(meta.shape), own, device))

    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, meta in list(module.named_parameters(recurse=False)):
            if meta not in given:
                given[meta] = nn.Parameter(slot(prefix + name, meta), requires_grad=False)
            module.register_parameter(name, given[meta])
        for name, meta in list(module.named_buffers(recurse=False)):
            if prefix + name in persistent:
                module.register_buffer(name, slot(prefix + name, meta))
            else:
                value = _rebuilt(module, path).get_buffer(name).to(device)
                module.register_buffer(name, value, persistent=False)
    return weights


def _shorten_lookups(model: nn.Module) -> None:
    """Let every module find its weights and children as plain attributes.

    torch keeps them in tables that it searches, in Python, once the plain lookup has failed:
    170 times a step of the demo model, one twentieth of it. What the tables hold is final here,
    because weights are written in place.
    """
    for module in model.modules():
        for table in ("_parameters", "_buffers", "_modules"):
            vars(module).update(vars(module)[table])


def _fp32_islands(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return what matches the names of parameters that stay FP32 in a narrower model.

    transformers has two lists: one for FP16 alone, a strict one for BF16 as well.
    """
    patterns = {*_ALWAYS_FP32, *(model._keep_in_fp32_modules_strict or ())}  # pyright: ignore[reportPrivateUsage]
    if dtype == torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())  # pyright: ignore[reportPrivateUsage]
    return re.compile("|".join(sorted(patterns)))


def _rebuilt(module: nn.Module, path: str) -> nn.Module:
    """Build a module again off `meta`, for the buffers that no checkpoint holds (`inv_freq`)."""
    config = vars(module).get("config")
    if config is None or any(True for _ in module.parameters()):
        raise CheckpointError(
            f"cannot compute the buffers of {path!r}",
            why=f"{type(module).__name__} is not built from a configuration alone",
            fix="serve another model",
        )
    return type(module)(config)
