# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random checkpoint of a mixture-of-experts family, in the form the hub publishes.

    python tools/make_tiny_checkpoint.py deepseek_v3 /tmp/tiny --seed 1

Every family has its own oddities on purpose: latent attention, routing groups, shared experts,
attention sinks, a sliding window, biases, interleaved gate and up. Weights are random but not
degenerate: routers spread, norms differ from one, biases differ from zero, so that a path that
drops one of them is seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

__all__ = ["FAMILIES", "add_draft_layers", "tiny_config", "tiny_model", "write_tiny_checkpoint"]

_COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_MLP: dict[str, Any] = dict(intermediate_size=96, moe_intermediate_size=32, num_experts_per_tok=2)

_LATENT: dict[str, Any] = dict(
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    num_key_value_heads=4,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(_MLP, head_dim=16, num_experts=8, norm_topk_prob=True),
    "qwen2_moe": dict(_MLP, num_experts=8, shared_expert_intermediate_size=48),
    "mixtral": dict(intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, head_dim=16),
    "olmoe": dict(intermediate_size=32, num_experts=8, num_experts_per_tok=2),
    "deepseek_v2": dict(_MLP, **_LATENT, topk_method="greedy"),
    "deepseek_v3": dict(_MLP, **_LATENT, n_group=2, topk_group=1),
    "glm4_moe_lite": dict(_MLP, **_LATENT, n_group=1, topk_group=1),
    "glm4_moe": dict(
        _MLP,
        head_dim=16,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "gpt_oss": dict(
        head_dim=16,
        intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "minimax_m2": dict(
        head_dim=16, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2
    ),
}


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """Return the family's tiny configuration, with some fields replaced."""
    return AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **overrides})


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """Build the family's Hugging Face model with random, non-degenerate weights, eager all over."""
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if tensor.is_floating_point():
            tensor.data.copy_(_draw(name, tensor, generator))
    return model.eval()


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if "e_score_correction_bias" in name:
        return 0.05 * noise
    if "bias" in name or tensor.dim() == 1:
        return 0.1 * noise
    return noise * max(tensor.shape[-2:]) ** -0.5


def write_tiny_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Save a model the way the hub publishes it: one tensor per expert and projection."""
    model.save_pretrained(folder, save_original_format=True)


# Families that number their draft layers on from the target's; the others call them `mtp.`.
_NUMBERED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")


def add_draft_layers(folder: Path, *, seed: int = 0, count: int = 1) -> dict[str, Tensor]:
    """Add random draft layers to a checkpoint, named as its family names them.

    Their blocks are like the checkpoint's last layer. Returns the tensors added.
    """
    config = json.loads((folder / "config.json").read_text())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{layers - 1}."
    generator = torch.Generator().manual_seed(1000 + seed)
    added: dict[str, Tensor] = {}
    for index in range(count):
        numbered = config["model_type"] in _NUMBERED
        block = f"model.layers.{layers + index}." if numbered else f"mtp.layers.{index}."
        own, copies = _draft_names(block if numbered else "mtp.", numbered=numbered)
        dtype = tensors[f"{last}input_layernorm.weight"].dtype
        shapes = dict.fromkeys(own, (width,)) | {own[2]: (width, 2 * width)}
        for name, old in sorted(tensors.items()):
            if name.startswith(last):
                shapes[block + name.removeprefix(last)] = tuple(old.shape)
        for name, shape in shapes.items():
            like = torch.empty(shape)
            added.setdefault(name, _draw(name, like, generator).to(dtype))
        added |= {name: tensors[whole].clone() for name, whole in copies.items()}
    config["num_nextn_predict_layers"] = count
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({**tensors, **added}, file, metadata={"format": "pt"})
    return added


def _draft_names(prefix: str, *, numbered: bool) -> tuple[list[str], dict[str, str]]:
    """Return the names of a draft's two norms, its projection and its last norm, and of copies."""
    if not numbered:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return [f"{prefix}{name}.weight" for name in names], {}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return [f"{prefix}{name}.weight" for name in names], {
        f"{prefix}{copy}.weight": f"{whole}.weight" for copy, whole in copies.items()
    }


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--mtp", action="store_true", help="add a draft layer")
    args = parser.parse_args()
    model = tiny_model(args.family, seed=args.seed, dtype=getattr(torch, args.dtype))
    write_tiny_checkpoint(model, args.folder)
    if args.mtp:
        add_draft_layers(args.folder, seed=args.seed)
    print(f"{args.family}: {model.num_parameters():,} parameters in {args.folder}")


if __name__ == "__main__":
    main()
