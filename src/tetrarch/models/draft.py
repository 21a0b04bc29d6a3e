# SPDX-License-Identifier: Apache-2.0
"""The draft: one multi-token-prediction head, the same formula for every family.

    h' = norm(block(fc([norm(embedding of t_{i+1}), norm(h_i)])))

h_i is the target's hidden state after its final norm, the block is a layer like the target's last
one, and the target's own head turns h' into logits; h' takes the place of h_{i+1} in the next step.
Embedding, rotary tables and head are the target's, never copies, so a reload keeps them shared.
(DeepSeek-V3, arXiv 2412.19437, section 2.2; SGLang and transformers order the two halves alike.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["DraftHead", "attach_draft", "draft_of", "last_layer"]

_ATTRIBUTE = "mtp"  # of the model: the first part of all our names of the draft's weights


class DraftHead(nn.Module):
    """What a draft has of its own, under Qwen3-Next's names.

    Args:
        target: On `meta`, with its own layers in place; part of its last layer's and of its final
            norm's shape is taken, nothing of their weights.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        body = target.base_model
        norm = body.get_submodule("norm")
        width = norm.get_parameter("weight").numel()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = map(copy.deepcopy, (norm, norm))
        self.fc = nn.Linear(2 * width, width, bias=False, dtype=target.dtype, device="meta")
        self.layers = nn.ModuleList([copy.deepcopy(last_layer(target))])
        self.norm = copy.deepcopy(norm)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, target: PreTrainedModel, **arguments: Any
    ) -> Tensor:
        """Return h'.

        Args:
            token_ids: (1, T) int64, of the tokens that follow the rows of `hidden`.
            hidden: (1, T, H), h or an earlier step's h'.
            target: Whose embedding and rotary tables are used.
            arguments: As the target's layers take them; `position_ids` is (1, T).
        """
        embedded = target.get_input_embeddings()(token_ids)
        halves = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        rows: Tensor = self.fc(torch.cat(halves, dim=-1))
        rotary = target.base_model.get_submodule("rotary_emb")
        tables = rotary(rows, arguments["position_ids"])
        for layer in self.layers:
            rows = layer(rows, attention_mask=None, position_embeddings=tables, **arguments)
        return self.norm(rows)


def last_layer(target: PreTrainedModel) -> nn.Module:
    """Return the layer that a draft's block is like."""
    *_, last = target.base_model.get_submodule("layers").children()
    return last


def attach_draft(target: PreTrainedModel) -> DraftHead:
    """Give a model on `meta` a draft: from now on all that walks the model finds it."""
    draft = DraftHead(target)
    setattr(target, _ATTRIBUTE, draft)
    return draft


def draft_of(target: PreTrainedModel) -> DraftHead | None:
    """Return the draft of a model that has one."""
    found = dict(target.named_children()).get(_ATTRIBUTE)
    return found if isinstance(found, DraftHead) else None
