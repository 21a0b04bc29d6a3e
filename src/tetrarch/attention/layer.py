# SPDX-License-Identifier: Apache-2.0
"""The attention function that is registered with the Hugging Face model.

The model calls it in every attention layer with its queries, keys and values. What it does is
decided by the *context* that the caller of the model passed along as a keyword argument, so two
models in one process share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from tetrarch.attention.backends import AttentionBackend
from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.core.errors import UnknownAttentionArgument
from tetrarch.kernels.attention.reference import ScoreRule

__all__ = [
    "CONTEXT",
    "AttentionCall",
    "AttentionContext",
    "AttentionRows",
    "LatentTap",
    "PagedAttention",
    "attention",
    "rows_of",
]

# Keyword under which the caller of the model passes the context.
CONTEXT = "tetrarch_attention"

_HONOURED = frozenset({CONTEXT, "scaling", "sliding_window", "s_aux", "is_causal", "dropout"})
# The layer's own arguments, which transformers passes on to every attention function.
_NOT_OURS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)
_ACCEPTED = _HONOURED | _NOT_OURS


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention layer asks for. Shapes carry the batch dimension of the model, 1."""

    query: Tensor  # (1, H, T, D)
    key: Tensor  # (1, G, T, D)
    value: Tensor  # (1, G, T, Dv)
    rule: ScoreRule


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What a layer writes to its pages and asks of them, a row for each of T tokens."""

    query: Tensor  # (T, H, D)
    key: Tensor  # (T, G, D); of MLA the latent, (T, 1, r)
    value: Tensor  # (T, G, Dv); of MLA the rotary key, (T, 1, d)
    expand: Tensor | None  # of MLA (H, n + v, r): latent -> a head's keys, then its values
    rule: ScoreRule


class AttentionContext(Protocol):
    """Answers the attention calls of one forward."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Return (1, T, H, Dv)."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Check an attention layer's arguments and hand the call to the forward's context.

    Returns:
        The output, (1, T, H, Dv), and no attention weights.

    Raises:
        UnknownAttentionArgument: The layer asks for something that we would ignore.
    """
    unknown = [
        name for name, given in arguments.items() if name not in _ACCEPTED and given is not None
    ]
    if arguments.get("is_causal") is False:
        unknown.append("is_causal=False")
    if arguments.get("dropout"):
        unknown.append("dropout")
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise UnknownAttentionArgument(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention",
            why="paged attention does not honour it, and ignoring it would change the result",
            fix="serve another model, or teach attention/layer.py this argument",
        )
    scale = arguments.get("scaling")
    rule = ScoreRule(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=arguments.get("sliding_window"),
        sinks=arguments.get("s_aux"),
    )
    context: AttentionContext = arguments[CONTEXT]
    return context.attend(module, AttentionCall(query, key, value, rule)), None


class LatentTap:
    """Stands where transformers expects a KV cache, and takes the latents of MLA as they pass.

    An MLA layer hands `update` its compressed keys, and expands whatever it gets back into
    full-size keys and values. We attend in the latent space and need no expansion, so only the
    first token is given back.
    """

    def __init__(self) -> None:
        self._latent: Tensor | None = None
        self._rotary: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Keep the latent (1, 1, T, r) and the rotary key (1, 1, T, d); return one token's."""
        self._latent, self._rotary = key, value
        return key[:, :, :1], value[:, :, :1]

    def take(self) -> tuple[Tensor, Tensor]:
        """Return what the layer left, (T, 1, r) and (T, 1, d), once."""
        latent, rotary = self._latent, self._rotary
        if latent is None or rotary is None:
            raise UnknownAttentionArgument(
                "a latent attention layer did not hand over its latents",
                why="it did not call `past_key_values.update` before its attention function",
                fix="serve another model; this one's attention changed in transformers",
            )
        self._latent = self._rotary = None
        return latent[0].transpose(0, 1), rotary[0].transpose(0, 1)


def rows_of(module: nn.Module, call: AttentionCall, tap: LatentTap | None) -> AttentionRows:
    """Return a call without the model's batch dimension; `tap`: of a layer with MLA."""
    query = call.query[0].transpose(0, 1)
    if tap is None:
        key, value, expand = call.key[0].transpose(0, 1), call.value[0].transpose(0, 1), None
    else:
        key, value = tap.take()
        weight = module.get_parameter("kv_b_proj.weight")
        expand = weight.view(query.shape[1], -1, weight.shape[-1])
    return AttentionRows(query, key, value, expand, call.rule)


class PagedAttention:
    """The context of one forward: keys and values go to pages, queries read them there.

    Args:
        inputs: The step.
        pool: The pages.
        sites: Each attention module's place in the pool.
        tap: What the model gets as `past_key_values`; `None` for models without MLA.
        backend: Who computes it.
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        pool: KVPool,
        *,
        sites: Mapping[nn.Module, AttentionSite],
        tap: LatentTap | None,
        backend: AttentionBackend,
    ) -> None:
        self._pool, self._sites, self._tap = pool, sites, tap
        self._step = backend.plan_batch(inputs, pool.page_size)

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Write the step's keys and values, then attend to all pages."""
        site = self._sites[module]
        rows = rows_of(module, call, self._tap if site.latent else None)
        return self.attend_rows(site.index, rows)[None]

    def attend_rows(self, site: int, rows: AttentionRows) -> Tensor:
        """Do so for the layer at this place in the pool: (T, H, Dv)."""
        keys, values, step = self._pool.key(site), self._pool.value(site), self._step
        step.write(keys, values, rows.key, rows.value)
        query, expand = rows.query, rows.expand
        if expand is None:
            return step.attend(query, keys, values, rows.rule)
        plain = query.shape[-1] - rows.value.shape[-1]
        latent = step.per_head(query[..., :plain], expand[:, :plain])
        found = step.attend_latent((latent, query[..., plain:]), keys, values, rows.rule)
        return step.per_head(found, expand[:, plain:].mT)
