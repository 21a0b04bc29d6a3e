# SPDX-License-Identifier: Apache-2.0
"""A plan becomes a model: the transformers class on `meta`, our parts swapped in, memory given."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tetrarch.attention.backends import AttentionBackend
from tetrarch.attention.build import build_attention
from tetrarch.attention.layer import CONTEXT, LatentTap, PagedAttention
from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs, AttentionSite
from tetrarch.config.budget import tokens_per_request
from tetrarch.config.patterns import matches
from tetrarch.config.plan import Plan, QuantPlan
from tetrarch.memory.arena import Arena
from tetrarch.memory.slots import SlotTable
from tetrarch.models.draft import DraftHead, draft_of
from tetrarch.models.expert_layers import swap_experts
from tetrarch.models.materialise import materialise, shorten_lookups
from tetrarch.models.names import NamePlan
from tetrarch.models.norms import fuse_norms
from tetrarch.models.one_row import one_row
from tetrarch.models.onednn import FEW_ROWS, FewRows, is_small, without_onednn
from tetrarch.models.rotary import tabulate_rotary
from tetrarch.models.row_invariant import RowInvariant
from tetrarch.models.skeleton import Skeleton, read_skeleton
from tetrarch.models.surgery import join_products
from tetrarch.moe.layer import MoELayer

__all__ = ["Forward", "Model", "build_model"]


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What one forward yields.

    Attributes:
        logits: (L, V), of the rows asked for.
        hidden: (T, H) after the final norm, of all rows; `None` unless it was asked for.
    """

    logits: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A built model. `load_weights` fills it, and refills it, in place.

    Attributes:
        hf: The Hugging Face model with our experts and our attention.
        names: Where checkpoint names go.
        experts: Path of each expert module to the layer that replaced it.
        ignored: Those of them that run unquantized, by `--fp4-ignored-layers`.
        sites: The attention layers, in the order of the KV pool.
        attention: Who computes them.
        weights: Every other parameter and persistent buffer, under its Hugging Face name; the
            model's parameters share this storage, whose address never changes.
        scratch: Buffers that the expert layers share.
        dtype: Of hidden states, keys and values.
        device: Where everything is.
        vocab_size: Width of the logits.
        deterministic: A row's bits depend on its own sequence alone.
    """

    hf: PreTrainedModel
    names: NamePlan
    experts: Mapping[str, MoELayer]
    ignored: frozenset[str]
    sites: tuple[AttentionSite, ...]
    attention: AttentionBackend
    weights: SlotTable
    scratch: SlotTable
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    deterministic: bool

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.hf.config.get_text_config().hidden_size

    @cached_property
    def draft(self) -> DraftHead | None:
        """What proposes tokens, where the plan speculates; its weights are among the model's."""
        return draft_of(self.hf)

    @cached_property
    def _site_of(self) -> Mapping[nn.Module, AttentionSite]:
        return {self.hf.get_submodule(site.name): site for site in self.sites}

    @cached_property
    def _is_latent(self) -> bool:
        return any(site.latent for site in self.sites)

    @cached_property
    def _is_small(self) -> bool:
        return is_small(self.hf)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
        *,
        wants_hidden: bool = False,
    ) -> Forward:
        """Compute one step of a flattened batch; writes its keys and values to the pool.

        Args:
            token_ids: (T,) int64, sequence after sequence.
            positions: (T,) int64, of each token in its own sequence.
            attn: Which rows are whose, and where their pages are.
            pool: The pages.
            logits_at: (L,) int64, rows whose logits are wanted.
            wants_hidden: Return hidden states as well.

        Returns:
            Logits and, if asked for, hidden states, in the model's dtype.
        """
        arguments = self._arguments(positions, attn, pool)
        kept: list[Tensor] = []
        with (
            self._arithmetic(len(token_ids)),
            _hidden_kept(self.hf.base_model, kept) if wants_hidden else nullcontext(),
        ):
            output = self.hf(input_ids=token_ids[None], logits_to_keep=logits_at, **arguments)
        return Forward(output.logits[0], kept[0] if wants_hidden else None)

    @torch.no_grad()
    def draft_forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
    ) -> Forward:
        """Compute one step of the draft; writes its keys and values to the pool.

        Row i holds what is known at position i, and the draft's entry for it lies in slot i of
        the sequence's own pages. It depends on token i + 1, so that the last slot of a page that
        two sequences share may hold an entry made with the other one's next token: that costs a
        little acceptance, and no correctness.

        Args:
            token_ids: (T,) int64, of the tokens that follow.
            hidden: (T, H), of the target, or of an earlier step of the draft.
            positions: (T,) int64, of the rows, not of the tokens that follow.
            attn: As for `forward`.
            pool: The pages.
            logits_at: (L,) int64, rows whose logits are wanted.

        Returns:
            Logits, and hidden states of all rows.

        Raises:
            RuntimeError: The model was built without a draft.
        """
        head = self.hf.get_output_embeddings()
        if self.draft is None or head is None:
            raise RuntimeError("the plan of this model does not speculate")
        arguments = self._arguments(positions, attn, pool)
        with self._arithmetic(len(token_ids)):
            rows = self.draft(token_ids[None], hidden[None], self.hf, **arguments)[0]
            return Forward(head(rows[logits_at]), rows)

    def _arguments(self, positions: Tensor, attn: AttentionInputs, pool: KVPool) -> dict[str, Any]:
        """Return what every layer is given."""
        tap = LatentTap() if self._is_latent else None
        context = PagedAttention(attn, pool, sites=self._site_of, tap=tap, backend=self.attention)
        given: dict[str, Any] = dict(position_ids=positions[None], past_key_values=tap)
        return {**given, "use_cache": False, CONTEXT: context}

    def _arithmetic(self, num_tokens: int) -> AbstractContextManager[object]:
        if self.deterministic:
            return RowInvariant()
        are_few = num_tokens <= FEW_ROWS and self._is_small
        return without_onednn() if are_few else nullcontext()


@contextmanager
def _hidden_kept(base: nn.Module, kept: list[Tensor]) -> Generator[None]:
    """Put into `kept` what the body of the model hands to its head."""

    def keep(_module: nn.Module, _arguments: object, output: Any) -> None:
        kept.append(output.last_hidden_state[0])

    hook = base.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def build_model(
    plan: Plan, *, device: torch.device | None = None, arena: Arena | None = None
) -> Model:
    """Build the model of a plan, with memory for its weights but nothing in it.

    Args:
        plan: Model, contract and expert plan are read.
        device: Where to build it; the plan's own device by default.
        arena: Where all weights live, if they are to be released and resumed. Scratch, and what
            is computed from the configuration alone, live elsewhere.

    Raises:
        CheckpointError: The model is not one we can serve.
        Unsupported: Its expert geometry does not fit the runner.
    """
    device = device or torch.device(plan.device.torch_device)
    dtype: torch.dtype = getattr(torch, plan.model.dtype)
    skeleton = read_skeleton(plan.model.path, dtype=dtype, drafts=plan.spec is not None)
    fuse_norms(skeleton.model, dtype=dtype, device=device)
    scratch, ignored = SlotTable(), _ignored(skeleton, plan.quant)
    layers = swap_experts(
        skeleton, plan, device=device, ignored=ignored, scratch=scratch, arena=arena
    )
    # Where a row's bits are its own, the number of rows must not decide how it is multiplied.
    chosen = {"cpu": FewRows(), "cuda": one_row}.get(device.type, F.linear)
    join_products(skeleton.model, F.linear if plan.deterministic else chosen)
    weights = materialise(skeleton.model, SlotTable(arena), dtype=dtype, device=device)
    tabulate_rotary(skeleton.model, num_positions=_num_positions(plan), dtype=dtype, device=device)
    shorten_lookups(skeleton.model)
    return Model(
        hf=skeleton.model,
        names=skeleton.names,
        experts=layers,
        ignored=ignored,
        sites=skeleton.attention,
        attention=build_attention(skeleton.attention, plan, device=device, scratch=scratch),
        weights=weights,
        scratch=scratch,
        dtype=dtype,
        device=device,
        vocab_size=plan.model.facts.vocab_size,
        deterministic=plan.deterministic,
    )


def _num_positions(plan: Plan) -> int:
    """A full context's drafts run over its end, by less than they and a page are long."""
    return plan.model.context_len + tokens_per_request(plan.spec) + plan.memory.page_size


def _ignored(skeleton: Skeleton, quant: QuantPlan) -> frozenset[str]:
    """Return the expert layers that run unquantized because a pattern names them."""
    paths = [site.path for site in skeleton.experts]
    return frozenset(path for path in paths if _is_ignored(path, quant.at(path), skeleton.names))


def _is_ignored(path: str, quant: QuantPlan, names: NamePlan) -> bool:
    """Whether a pattern names the layer, by its path in transformers or in the checkpoint."""
    if not quant.contract.quantizes_weights:
        return False
    patterns = {form for p in quant.ignored_layers for form in (p, names.module_path(p))}
    return any(matches(pattern, path) for pattern in patterns)
