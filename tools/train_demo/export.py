# SPDX-License-Identifier: Apache-2.0
"""The trained model as a Hugging Face checkpoint: published tensor names, and config.json."""

from __future__ import annotations

import torch
from model import DemoModel, Shape
from torch import Tensor

__all__ = ["checkpoint", "config"]


def checkpoint(model: DemoModel) -> dict[str, Tensor]:
    """Return the published tensor names with BF16 copies on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        full = name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"
        stem, _, leaf = full.rpartition(".")
        if leaf == "gate_up":
            for expert, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                tensors[f"{stem}.experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{stem}.experts.{expert}.up_proj.weight"] = up
        elif leaf == "down":
            for expert, matrix in enumerate(value):
                tensors[f"{stem}.experts.{expert}.down_proj.weight"] = matrix
        else:
            tensors[full] = value
    return {
        name: value.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
        for name, value in tensors.items()
    }


def config(shape: Shape) -> dict[str, object]:
    """Return `config.json`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "router_aux_loss_coef": 0.01,
    }
