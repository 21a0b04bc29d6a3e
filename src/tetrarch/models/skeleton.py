# SPDX-License-Identifier: Apache-2.0
"""A model on `meta`: everything that can be known, and refused, before a weight is read.

One token pair is sent through the model without data. The experts and the attention layers that
answer it are the ones we will replace, seen exactly as the real forward will call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tetrarch.attention.layer import CONTEXT, AttentionCall, attention
from tetrarch.attention.types import AttentionSite
from tetrarch.core.errors import CheckpointError, TetrarchError
from tetrarch.models.draft import attach_draft, draft_of
from tetrarch.models.experts import ExpertShape, expert_shape, is_expert_module
from tetrarch.models.names import NamePlan

__all__ = ["ExpertSite", "Skeleton", "read_config", "read_skeleton", "swap_module"]

ATTENTION = "tetrarch"
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)

_LAYER_KINDS = {"full_attention", "sliding_attention"}
# These rescale with the longest position of the batch, which mixes sequences.
_LIVE_ROPE = {"dynamic", "longrope"}
# What transformers raises over numbers that do not go together.
_STUMBLES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# MLA families whose absorbed form is tested against Hugging Face (tests/models/test_families.py).
_LATENT_FAMILIES = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """One expert module and how it is called."""

    path: str
    shape: ExpertShape
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without data, its own experts still in place."""

    model: PreTrainedModel
    names: NamePlan
    experts: tuple[ExpertSite, ...]
    attention: tuple[AttentionSite, ...]


def read_skeleton(path: str, *, dtype: torch.dtype, drafts: bool = False) -> Skeleton:
    """Build the transformers class named by `config.json` on `meta`, and look it over.

    Args:
        path: Checkpoint folder; only its `config.json` is read.
        dtype: Of the parameters.
        drafts: Give the model a draft, which passes every seam that the model passes.

    Raises:
        CheckpointError: The model is not one we can serve; says which part is the obstacle.
        UnknownAttentionArgument: Its attention asks for something we would ignore.
    """
    config = read_config(path)
    _refuse_by_config(config)
    model = _instantiate(config, dtype, drafts=drafts)
    shapes = {
        name: expert_shape(module)
        for name, module in model.named_modules()
        if is_expert_module(module)
    }
    if not shapes:
        raise _refusal(config, "it has no expert layers in a form that we can replace")
    top_k, sites = _visit(model, shapes)
    return Skeleton(
        model=model,
        names=NamePlan(model),
        experts=tuple(ExpertSite(path, shapes[path], k) for path, k in top_k.items()),
        attention=sites,
    )


def swap_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put `module` at `path` and return what was there."""
    parent, _, leaf = path.rpartition(".")
    old = model.get_submodule(path)
    setattr(model.get_submodule(parent), leaf, module)
    return old


def read_config(path: str) -> PreTrainedConfig:
    """Read `config.json` of a folder.

    Raises:
        CheckpointError: It is missing, damaged, or of a model that transformers does not know.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(
            f"cannot read the model configuration in {path!r}",
            why=" ".join(str(error).split()),
            fix="name a folder with the config.json of a model that transformers knows",
        ) from error
    if "output_router_logits" in vars(config):
        config.output_router_logits = False  # a training loss over all tokens, at every step
    return config


def _refuse_by_config(config: PreTrainedConfig) -> None:
    fields = vars(config.get_text_config())
    kinds = {
        str(kind)
        for name in ("layer_types", "layers_block_type")
        for kind in fields.get(name) or ()
    }
    if other := sorted(kinds - _LAYER_KINDS):
        raise _refusal(config, f"it has layers of kind {', '.join(other)}")
    ropes = fields.get("rope_parameters") or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, Mapping))):
        if rope.get("rope_type") in _LIVE_ROPE:
            raise _refusal(config, f"its rotary embedding is {rope['rope_type']}")


def _instantiate(config: PreTrainedConfig, dtype: torch.dtype, *, drafts: bool) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
            )
            if drafts:
                attach_draft(model)
    except _STUMBLES as error:
        why = f"transformers cannot build it: {type(error).__name__}: {error}"
        raise _refusal(config, why) from error
    return model.eval()


def _visit(
    model: PreTrainedModel, shapes: Mapping[str, ExpertShape]
) -> tuple[dict[str, int], tuple[AttentionSite, ...]]:
    """Send two tokens through the model on `meta`, and on through its draft."""
    probes = {path: _ExpertProbe() for path in shapes}
    recorder = _AttentionRecorder(model)
    theirs = {path: swap_module(model, path, probe) for path, probe in probes.items()}
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    arguments: dict[str, Any] = dict(position_ids=ids, past_key_values=recorder, use_cache=False)
    arguments[CONTEXT] = recorder
    draft = draft_of(model)
    try:
        with torch.no_grad():
            model(input_ids=ids, logits_to_keep=ids[0, :1], **arguments)
            if draft is not None:
                width = draft.fc.out_features
                hidden = torch.empty(1, 2, width, dtype=model.dtype, device="meta")
                draft(ids, hidden, model, **arguments)
    except TetrarchError:
        raise
    except _STUMBLES as error:
        why = f"a forward without data failed: {type(error).__name__}: {error}"
        raise _refusal(model.config, why) from error
    finally:
        for path, module in theirs.items():
            swap_module(model, path, module)
    sites = tuple(recorder.sites)
    if len(sites) != (layers := model.config.num_hidden_layers + (draft is not None)):
        why = f"{len(sites)} of its {layers} layers attend to pages"
        raise _refusal(model.config, why)
    return {path: probe.top_k for path, probe in probes.items() if probe.top_k}, sites


class _ExpertProbe(nn.Module):
    """Notes how an expert module is called."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if hidden_states.dim() != 2 or top_k_index.shape != top_k_weights.shape:
            raise TypeError("experts are called with (T, H), (T, K), (T, K)")
        self.top_k = top_k_index.shape[-1]
        return hidden_states


class _AttentionRecorder:
    """Notes what each attention layer keeps; stands for the KV cache as well."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.sites: list[AttentionSite] = []
        self._config = model.config
        self._paths = {module: path for path, module in model.named_modules()}
        self._kept: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *_where: object) -> tuple[Tensor, Tensor]:
        self._kept = (key, value)
        return key, value

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        key, value = self._kept or (call.key, call.value)
        latent = key is not call.key
        if latent and self._config.model_type not in _LATENT_FAMILIES:
            why = "it changes keys between its cache and its attention, in a way we do not know"
            raise _refusal(self._config, why)
        self._kept = None
        self.sites.append(
            AttentionSite(
                index=len(self.sites),
                name=self._paths[module],
                num_heads=call.query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[-1],
                value_dim=value.shape[-1],
                latent=latent,
            )
        )
        query = call.query
        return query.new_empty(1, query.shape[2], query.shape[1], call.value.shape[-1])


def _refusal(config: PreTrainedConfig, why: str) -> CheckpointError:
    return CheckpointError(
        f"model type {config.model_type!r} is not supported",
        why=why,
        fix="serve a mixture-of-experts model with plain or latent attention in every layer",
    )
