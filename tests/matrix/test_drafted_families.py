# SPDX-License-Identifier: Apache-2.0
"""Random MTP checkpoints of the families that Hugging Face drafts with: the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from conftest import Live

PROMPT = (5, 3, 8, 200, 17)  # as `Live.say` sends it, for 12 tokens


def hugging_face(path: Path) -> tuple[int, ...]:
    """Greedy tokens of Hugging Face, drafting with the checkpoint's MTP layer."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    # Where it looks for drafts; the hub's own checkpoints have other numbers of layers.
    vars(model)["_keys_to_ignore_on_load_unexpected"] = [r"model\.layers\.4.*"]
    ids = torch.tensor([PROMPT])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        use_mtp=True,
        eos_token_id=None,
    )
    return tuple(found[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_drafted_tokens_equal_hugging_faces(
    live: type[Live], drafted_checkpoint: Callable[..., Path], family: str
) -> None:
    path = drafted_checkpoint(family)
    tokens, _ = live(path, quantization="none", speculative_algorithm="mtp").say()
    assert tokens == live(path, quantization="none").say()[0] == hugging_face(path)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_drafted_tokens_are_the_models_own_under_the_contract(
    live: type[Live], drafted_checkpoint: Callable[..., Path], family: str
) -> None:
    path = drafted_checkpoint(family, hidden_size=64)
    drafted, plain = live(path, speculative_algorithm="mtp"), live(path)
    assert drafted.plan.quant.contract.name == "nvfp4_online/per_token"
    assert drafted.say()[0] == plain.say()[0]
