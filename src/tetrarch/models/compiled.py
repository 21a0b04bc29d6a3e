# SPDX-License-Identifier: Apache-2.0
"""Decoder layers through `torch.compile`: one compilation for each kind of layer, in one piece.

A layer of 63 kernels becomes one of 16 or fewer. Attention and experts are opaque to the compiler:
two operators that take tensors, among them the layer's number, and find the rest in the objects of
their own model. A layer's number and its weights are inputs of what is compiled, so that all layers
of a kind share it; weights are written in place, so that it outlives every reload.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from tetrarch.attention.layer import (
    CONTEXT,
    AttentionCall,
    AttentionRows,
    LatentTap,
    PagedAttention,
    rows_of,
)
from tetrarch.kernels.attention.reference import ScoreRule
from tetrarch.models.build import Model
from tetrarch.models.draft import draft_of
from tetrarch.models.skeleton import swap_module
from tetrarch.moe.layer import MoELayer

__all__ = ["compile_layers"]

_OURS = frozenset({CONTEXT, "past_key_values"})  # arguments of a layer that we answer ourselves
_count = itertools.count()  # operators need a name of their own
_ATTEND = (
    "attend(Tensor query, Tensor key, Tensor value, Tensor? expand, Tensor? sinks, Tensor site, "
    "float scale, int? window) -> Tensor"
)
_EXPERTS = "experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor site) -> Tensor"


def compile_layers(
    model: Model,
    *,
    backend: str | Callable[..., Any] = "inductor",
    options: dict[str, Any] | None = None,
) -> None:
    """Let every decoder layer of a model, and of its draft, run compiled.

    Compilation itself happens when a layer first runs: once for a single token and once for any
    other number of them, for each kind of layer.

    Args:
        model: Loaded. Its parts are replaced in place; weights and their names stay.
        backend: Of `torch.compile`.
        options: Likewise.
    """
    opaque = OpaqueCalls(list(model.experts.values()))
    for number, path in enumerate(model.experts):
        swap_module(model.hf, path, OpaqueExperts(opaque.experts, number))
    draft = draft_of(model.hf)
    bodies = [model.hf.base_model, *([] if draft is None else [draft])]
    how: dict[str, Any] = dict(fullgraph=True, dynamic=True, backend=backend, options=options)
    compiled: dict[tuple[type, ...], Callable[..., Any]] = {}
    for layer in (each for body in bodies for each in body.get_submodule("layers").children()):
        parts = tuple(type(module) for module in layer.modules())
        if parts not in compiled:
            compiled[parts] = torch.compile(_own_run(), **how)
        [site] = [s for s in model.sites if _is_within(model.hf, s.name, layer)]
        layer.forward = CompiledLayer(
            layer, compiled[parts], opaque, number=site.index, latent=site.latent
        )


def _own_run() -> Callable[..., Any]:
    """Return `_run` with a code object of its own.

    torch looks up there what it has compiled, and takes no more than eight results; a kind has two
    or, where a window tells layers apart, four.
    """
    return FunctionType(_run.__code__.replace(), _run.__globals__)


def _is_within(model: nn.Module, path: str, layer: nn.Module) -> bool:
    found = model.get_submodule(path)
    return any(module is found for module in layer.modules())


class OpaqueCalls:
    """The operators of one model, and what they stand for.

    Attributes:
        context: Of the forward that is running.
        attend: Operator: writes a layer's keys and values, and attends.
        experts: Operator: runs a layer's experts.
    """

    def __init__(self, layers: list[MoELayer]) -> None:
        self.context: PagedAttention | None = None
        self._layers = layers
        name = f"tetrarch_{next(_count)}"
        self._library = Library(name, "DEF")  # its operators live as long as it does
        for schema, run, shape in (
            (_ATTEND, self._attend, _attended),
            (_EXPERTS, self._experts, _mixed),
        ):
            self._library.define(schema)
            op = schema.partition("(")[0]
            self._library.impl(op, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{name}::{op}", shape, lib=self._library)
        ops = getattr(torch.ops, name)
        self.attend: Callable[..., Tensor] = ops.attend.default
        self.experts: Callable[..., Tensor] = ops.experts.default

    def _attend(  # noqa: PLR0913 - an operator takes tensors and numbers, no objects
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        expand: Tensor | None,
        sinks: Tensor | None,
        site: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        assert self.context is not None, "a compiled layer ran outside of a forward"
        rule = ScoreRule(scale=scale, window=window, sinks=sinks)
        rows = AttentionRows(query, key, value, expand, rule)
        return self.context.attend_rows(int(site), rows).contiguous()

    def _experts(self, hidden: Tensor, topk_ids: Tensor, weights: Tensor, site: Tensor) -> Tensor:
        return self._layers[int(site)](hidden, topk_ids, weights).contiguous()


def _attended(
    query: Tensor, _key: Tensor, value: Tensor, expand: Tensor | None, *_rest: object
) -> Tensor:
    """Return memory of the shape of `attend`'s result: (T, H, Dv)."""
    width = value.shape[-1]
    if expand is not None:
        width = expand.shape[1] - (query.shape[-1] - value.shape[-1])
    return query.new_empty(query.shape[0], query.shape[1], width)


def _mixed(hidden: Tensor, *_rest: object) -> Tensor:
    """Return memory of the shape of `experts`' result."""
    return hidden.new_empty(hidden.shape)


class OpaqueExperts(nn.Module):
    """Stands where the model has an expert layer, and calls it through the operator."""

    def __init__(self, experts: Callable[..., Tensor], number: int) -> None:
        super().__init__()
        self._experts, self._site = experts, torch.tensor(number)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Call it; what the kernels want narrowed is narrowed by what is compiled around it."""
        return self._experts(hidden_states, top_k_index.int(), top_k_weights.float(), self._site)


class CompiledLayer:
    """The forward of one decoder layer."""

    def __init__(
        self,
        layer: nn.Module,
        compiled: Callable[..., Any],
        opaque: OpaqueCalls,
        *,
        number: int,
        latent: bool,
    ) -> None:
        self._layer, self._compiled, self._opaque = layer, compiled, opaque
        self._site, self._latent = torch.tensor(number), latent

    def __call__(self, hidden_states: Tensor, **given: Any) -> Any:
        """Run it as the model does, in the context that came along."""
        self._opaque.context = given[CONTEXT]
        where = (self._opaque.attend, self._site, self._latent)
        # What says nothing is left out: a model, a draft and another version of transformers
        # differ in it, and would each be compiled.
        said = {
            name: value
            for name, value in given.items()
            if name not in _OURS and value is not None and value is not False
        }
        return self._compiled(self._layer, hidden_states, where, said)


class _OpaqueAttention:
    """The context that a layer sees while it is compiled."""

    def __init__(self, attend: Callable[..., Tensor], site: Tensor, tap: LatentTap | None) -> None:
        self._attend, self._site, self._tap = attend, site, tap

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        rows, rule = rows_of(module, call, self._tap), call.rule
        return self._attend(
            rows.query,
            rows.key,
            rows.value,
            rows.expand,
            rule.sinks,
            self._site,
            rule.scale,
            rule.window,
        )[None]


def _run(
    layer: nn.Module,
    hidden_states: Tensor,
    where: tuple[Callable[..., Tensor], Tensor, bool],
    given: Mapping[str, Any],
) -> Any:
    """Call the layer's own forward; this is what is compiled."""
    attend, site, latent = where
    tap = LatentTap() if latent else None
    context = {CONTEXT: _OpaqueAttention(attend, site, tap)}
    return type(layer).forward(layer, hidden_states, past_key_values=tap, **given, **context)
