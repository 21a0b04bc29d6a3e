# SPDX-License-Identifier: Apache-2.0
"""The demo model for training: Qwen3-MoE with a Qwen3-Next-style MTP layer.

Numerically the transformers class `Qwen3MoeForCausalLM`; `export.py` writes its tensor names.
Letters: B rows, T tokens, H hidden, E experts, I intermediate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DemoModel", "RouterLosses", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes; every GEMM dimension is a multiple of 128, as grouped kernels like it."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    intermediate: int = 128
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    mtp_steps: int = 3
    context: int = 2048


@dataclass(slots=True)
class RouterLosses:
    """What the routers are asked for besides the answer, summed over layers."""

    balance: list[Tensor]
    z: list[Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q and k, and v, each (B, heads, T, head_dim)."""
        q = _rotated(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rope)
        k = _rotated(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), rope)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim))

    def output(self, o: Tensor) -> Tensor:
        return self.o_proj(o.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.project(x, rope)
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def later_step(
        self, x: Tensor, rope: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend as the second or a later draft step does.

        Position j sees the first step's entries up to j, and entry j of every later step: what
        a decoder has whose KV holds true entries up to j and the drafts since.
        """
        q, k, v = self.project(x, rope)
        scale = 1 / math.sqrt(self.shape.head_dim)
        (first_k, first_v), tail = earlier[0], [*earlier[1:], (k, v)]
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = ((q @ first_k.mT) * scale).masked_fill(future, -math.inf)
        own = [(q * key).sum(-1, keepdim=True) * scale for key, _ in tail]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(v.dtype)
        out = weights[..., :length] @ first_v
        for at, (_, value) in enumerate(tail):
            out = out + weights[..., length + at, None] * value
        return self.output(out), (k, v)


class Experts(nn.Module):
    """All experts for all tokens in two GEMMs; the router's zeros switch the rest off.

    The same function and gradient as sparse dispatch, and faster for so few and small experts.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(
            torch.empty(shape.experts, 2 * shape.intermediate, shape.hidden)
        )
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.intermediate))

    def forward(self, x: Tensor, mask: Tensor, losses: RouterLosses) -> Tensor:
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(flat.float(), self.gate.weight.float())
        scores = logits.softmax(-1)
        weights, chosen = scores.topk(self.shape.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        routed = torch.zeros_like(scores).scatter(-1, chosen, weights)
        self._note(losses, logits, scores, routed, mask)
        both = F.linear(flat, self.gate_up.flatten(0, 1)).unflatten(-1, (self.shape.experts, -1))
        gate, up = both.chunk(2, -1)
        inner = F.silu(gate) * up * routed.to(both.dtype)[..., None]
        down = self.down.permute(1, 0, 2).flatten(1)
        return F.linear(inner.flatten(1), down).view(x.shape)

    def _note(
        self, losses: RouterLosses, logits: Tensor, scores: Tensor, routed: Tensor, mask: Tensor
    ) -> None:
        real = mask.reshape(-1, 1).float()
        count = real.sum().clamp(min=1)
        share = ((routed > 0).float() * real).sum(0) / count / self.shape.top_k
        mean = (scores * real).sum(0) / count
        losses.balance.append(self.shape.experts * (share.detach() * mean).sum())
        losses.z.append((logits.logsumexp(-1).pow(2) * real[:, 0]).sum() / count)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Experts(shape)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, losses: RouterLosses
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x), mask, losses)


class Draft(nn.Module):
    """The MTP layer; `forward` runs all its steps on a whole batch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden, shape.eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden, shape.eps)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.eps)


class DemoModel(nn.Module):
    """Trunk, head and draft."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.mtp = Draft(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, _initial_std(name, parameter, shape))
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _rope(self, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        at = slice(start, start + length)
        return self.cos[at].to(like.dtype), self.sin[at].to(like.dtype)

    def trunk(self, ids: Tensor, mask: Tensor, losses: RouterLosses) -> Tensor:
        """Return hidden states after the final norm: (B, T, H)."""
        x = self.embed_tokens(ids)
        rope = self._rope(0, ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, rope, mask, losses)
        return self.norm(x)

    def drafts(
        self, ids: Tensor, hidden: Tensor, mask: Tensor, losses: RouterLosses
    ) -> list[Tensor]:
        """Return logits of every draft step; index j of step n predicts token j + n + 1."""
        draft, layer = self.mtp, self.mtp.layers[0]
        predictions: list[Tensor] = []
        earlier: list[tuple[Tensor, Tensor]] = []
        for step in range(1, self.shape.mtp_steps + 1):
            ahead = self.embed_tokens(F.pad(ids[:, step:], (0, step))).to(hidden.dtype)
            pair = (draft.pre_fc_norm_embedding(ahead), draft.pre_fc_norm_hidden(hidden))
            x = draft.fc(torch.cat(pair, -1))
            rope = self._rope(step - 1, ids.shape[1], x)
            normed = layer.input_layernorm(x)
            if step == 1:
                q, k, v = layer.self_attn.project(normed, rope)
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                out, entry = layer.self_attn.output(attended), (k, v)
            else:
                out, entry = layer.self_attn.later_step(normed, rope, earlier)
            earlier.append(entry)
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x), mask, losses)
            hidden = draft.norm(x)
            predictions.append(self.lm_head(hidden))
        return predictions


def _initial_std(name: str, parameter: Tensor, shape: Shape) -> float:
    if "embed" in name:
        return 0.02
    into_residual = "o_proj" in name or "down" in name
    depth = math.sqrt(2 * shape.layers) if into_residual else 1.0
    return 0.5 / math.sqrt(parameter.shape[-1]) / depth


def _rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table.to(x.dtype) for table in rope)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
