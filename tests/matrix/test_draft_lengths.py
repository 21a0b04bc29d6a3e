# SPDX-License-Identifier: Apache-2.0
"""Real weights of which it is known how often they guess right, and that the text is the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tetrarch.commands.arithmetic.problems import Split, eval_split

if TYPE_CHECKING:
    from conftest import Live

MTP = {"speculative_algorithm": "mtp"}
ROOM = {"context_length": 512, "chunked_prefill_size": 256, "max_total_tokens": 2048}
FILE = "model.safetensors"


@pytest.fixture(scope="session")
def problems(demo_path: Path) -> list[list[int]]:
    """Prompts of word problems, as the demo model knows them."""
    tokenizer = Tokenizer.from_file(str(demo_path / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    asked = islice(eval_split(Split.TEST), 4)
    return [tokenizer.encode(chat.format(one.question)).ids for one in asked]


def test_a_random_draft_of_its_own_folder_yields_hardly_more_than_nothing(
    live: type[Live], demo_path: Path, problems: list[list[int]], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.ndim > 1
        else torch.ones_like(tensor)
        for name, tensor in load_file(demo_path / FILE).items()
        if name.startswith("mtp.")
    }
    save_file(weights, tmp_path / FILE)
    drafting = {**MTP, "speculative_draft_model_path": str(tmp_path)}
    settings: dict[str, Any] = {**ROOM, "dtype": "bfloat16", "deterministic": True}
    off, _ = live(demo_path, **settings).answer(problems, count=40)
    on, length = live(demo_path, **settings, **drafting).answer(problems, count=40)
    assert on == off
    assert 1.0 <= length <= 1.2
    on, length = live(demo_path, **settings, **MTP).answer(problems, count=40)
    assert on == off
    assert length > 3.0, "its own draft, as a control"


def test_a_draft_that_is_its_target_yields_exactly_the_maximum(
    live: type[Live], drafted_checkpoint: Callable[..., Path]
) -> None:
    """One layer over embeddings of length 1, deaf to other tokens: so is a draft of that layer."""
    path = drafted_checkpoint("qwen3_moe", num_hidden_layers=1)
    tensors = load_file(path / FILE)
    embedding = torch.where(tensors["model.embed_tokens.weight"] < 0, -1.0, 1.0)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding.roll(1, dims=0)  # or a token would follow itself
    for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
        tensors[name] = tensors[name.replace("mtp.", "model.")]
    for name in ("model", "mtp"):
        tensors[f"{name}.layers.0.self_attn.o_proj.weight"].zero_()
    width = embedding.shape[1]
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.ones(width)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / FILE)
    prompts = [[5, 3, 8], [200, 17], [91]]
    off, none = live(path, quantization="none").answer(prompts, count=25)
    assert none == 0
    assert len(set(off[0])) > 20
    for steps in (1, 2, 3):
        server = live(path, quantization="none", **MTP, speculative_num_steps=steps)
        on, length = server.answer(prompts, count=25)  # 24 behind the prompt's, a whole multiple
        assert on == off
        assert length == steps + 1


@pytest.mark.parametrize("activations", ["per_token", "per_tensor", "bf16"])
def test_a_plain_draft_in_a_serialized_checkpoint_yields_more_than_one(
    live: type[Live],
    quantized: Callable[[Path], Path],
    demo_path: Path,
    problems: list[list[int]],
    activations: str,
) -> None:
    settings: dict[str, Any] = {
        **ROOM,
        "quantization": "modelopt_fp4",
        "moe_activations": activations,
        "dtype": "bfloat16",
        "deterministic": True,
    }
    path = quantized(demo_path)
    off, _ = live(path, **settings).answer(problems, count=24)
    server = live(path, **settings, **MTP)
    [said] = [one for one in server.plan.decisions if one.field == "draft_experts"]
    assert said.value == "bf16 as stored"
    on, length = server.answer(problems, count=24)
    assert on == off
    assert length > 2.0, "of 4; the tool's static input scale is nobody's"
