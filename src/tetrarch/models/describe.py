# SPDX-License-Identifier: Apache-2.0
"""Count a model on `meta`, for `config/resolve`: no weight is read."""

from __future__ import annotations

import torch

from tetrarch.attention.pool import bytes_per_token
from tetrarch.config.plan import ModelFacts
from tetrarch.core.errors import CheckpointError
from tetrarch.models.draft import DraftHead
from tetrarch.models.experts import is_expert_module
from tetrarch.models.names import num_mtp_layers
from tetrarch.models.skeleton import Skeleton, read_skeleton

__all__ = ["describe"]


def describe(path: str) -> ModelFacts:
    """Return what the model in a folder is. DeepSeek-V3 takes about a second.

    Args:
        path: Checkpoint folder; only its `config.json` is read.

    Raises:
        CheckpointError: The model is not one we can serve; says which part is the obstacle.
        UnknownAttentionArgument: Its attention asks for something we would ignore.
    """
    skeleton = read_skeleton(path, dtype=torch.bfloat16)
    config = skeleton.model.config.get_text_config()
    fields = vars(config)
    total, expert_params = _num_params(skeleton)
    if not skeleton.experts:
        raise CheckpointError(
            f"model type {config.model_type!r} is not supported with these numbers",
            why="no token would reach an expert: the configuration asks for no expert per token",
            fix="correct num_experts_per_tok in config.json",
        )
    draft, draft_experts = _num_draft_params(skeleton)
    sizes = [site.shape for site in skeleton.experts]
    largest = max(sizes, key=lambda shape: shape.num_experts * shape.intermediate_size)
    return ModelFacts(
        model_type=config.model_type,
        architectures=tuple(fields.get("architectures") or (type(skeleton.model).__name__,)),
        num_layers=config.num_hidden_layers,
        num_moe_layers=len(skeleton.experts),
        num_experts=largest.num_experts,
        top_k=max(site.top_k for site in skeleton.experts),
        hidden_size=config.hidden_size,
        expert_hidden_size=largest.hidden_size,
        expert_intermediate_size=largest.intermediate_size,
        vocab_size=config.vocab_size,
        context_len=config.max_position_embeddings,
        num_dense_params=total - expert_params,
        num_expert_params=expert_params,
        kv_elements_per_token=bytes_per_token(skeleton.attention, torch.int8),
        num_mtp_layers=num_mtp_layers(config),
        num_draft_dense_params=draft - draft_experts,
        num_draft_expert_params=draft_experts,
        draft_kv_elements_per_token=bytes_per_token(skeleton.attention[-1:], torch.int8),
    )


def _num_params(skeleton: Skeleton) -> tuple[int, int]:
    """Count all parameters, a tied one once, and those of the experts."""
    experts = sum(
        parameter.numel()
        for site in skeleton.experts
        for parameter in skeleton.model.get_submodule(site.path).parameters()
    )
    return sum(parameter.numel() for parameter in skeleton.model.parameters()), experts


def _num_draft_params(skeleton: Skeleton) -> tuple[int, int]:
    """Count the parameters that a draft would add, and those of its experts among them."""
    try:
        draft = DraftHead(skeleton.model)
    except AttributeError:  # a body that calls its layers or its norm otherwise cannot have one
        return 0, 0
    experts = [module for module in draft.modules() if is_expert_module(module)]
    return (
        sum(parameter.numel() for parameter in draft.parameters()),
        sum(parameter.numel() for module in experts for parameter in module.parameters()),
    )
