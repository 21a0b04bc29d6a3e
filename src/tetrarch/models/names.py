# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint tensor goes: a dense parameter, or a matrix of one expert.

The only file that leans on transformers' private name mapping, which it uses as an oracle for
names alone; no tensor passes through it. `tests/models/test_names.py` pins the families.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from tetrarch.config.drafts import BLOCK, DRAFT, DRAFT_COPY, draft_place
from tetrarch.core.errors import CheckpointError
from tetrarch.models.destinations import DenseDestination, Destination, ExpertDestination
from tetrarch.models.draft import draft_of, last_layer
from tetrarch.models.experts import is_expert_module
from tetrarch.moe.types import Part

__all__ = [
    "MTP_FIELDS",
    "Ignored",
    "NamePlan",
    "num_mtp_layers",
]

# A number that is a whole component of a dotted name: a layer or an expert, not the 1 of `w1`.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MTP = re.compile(r"^(model\.)?mtp\.")
_LATER_MTP = re.compile(r"^mtp\.layers\.[1-9]")
# A draft layer numbered on from the model's own, as DeepSeek and GLM write it, and its mark: what
# joins the last hidden state to the next embedding, and a head that is shared.
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(?:(eh_proj|enorm|hnorm|shared_head)\.)?")
_NUMBERED = r"model\.layers\."  # how transformers' list of names to skip begins for them
# How families spell the number of their draft layers.
MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
# Only these are undone by naming the expert and the part; any other op would change the tensor.
_NAMED_OPS = {"MergeModulelist", "Concatenate"}


class Ignored(StrEnum):
    """Why a known checkpoint tensor has no destination."""

    MTP = "mtp"  # draft layers: all of them while speculation is off, else all but the first
    DRAFT_COPY = "draft_copy"  # a draft's copy of the embedding or the head, which it shares
    ROTARY = "rotary"  # inv_freq, recomputed from the config
    TIED = "tied"  # a second copy of the embedding


@dataclass(frozen=True, slots=True)
class _Stack:
    """How transformers keeps one layer's experts."""

    num_experts: int
    gated: bool
    transposed: bool
    interleaved: bool


@dataclass(frozen=True, slots=True)
class _Template:
    """Names that differ only in their numbers: `model.layers.{}.mlp.experts.{}.w1.weight`."""

    layer: str  # with `{}` for every number but the last, which is the expert
    part: Part | None


def num_mtp_layers(config: PreTrainedConfig) -> int:
    """Return how many draft layers a configuration announces."""
    fields = vars(config.get_text_config())
    return next((int(fields[name]) for name in MTP_FIELDS if fields.get(name)), 0)


class NamePlan:
    """Resolve checkpoint names of one model.

    Args:
        model: The transformers model on `meta`, with its own expert modules still in place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
        self._converters = [step for step in mapping if isinstance(step, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._model_type = str(model.config.model_type)
        skipped: Collection[str] = model._keys_to_ignore_on_load_unexpected or ()  # pyright: ignore[reportPrivateUsage]
        numbered = any(pattern.startswith(_NUMBERED) for pattern in skipped)
        first = int(model.config.num_hidden_layers)
        self._first, self._has_draft = first, draft_of(model) is not None
        num_drafts = max(num_mtp_layers(model.config), int(self._has_draft))
        numbered |= self._has_draft  # another folder may name them so
        self.numbered_drafts = range(first, first + num_drafts * numbered)
        self._last = _path_of_last_layer(model) if self._has_draft else ""
        self._tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self._names = dict.fromkeys(model.state_dict(), True)
        self._stacks = {
            path: _stack(module)
            for path, module in model.named_modules()
            if is_expert_module(module)
        }
        self._templates: dict[tuple[str, ...], _Template] = {}

    def resolve(self, name: str) -> Destination | None:
        """Return where a tensor goes, or `None` when it is known to go nowhere (`ignored`).

        Args:
            name: Checkpoint name; of a quantized weight the base name, `….weight`, not a scale's.

        Raises:
            CheckpointError: The model has no such tensor.
        """
        if (place := self._draft_place(name)) is not None:
            return None if place == DRAFT_COPY else self._of_draft(name, place)
        pieces = tuple(_NUMBER.split(name))
        template = self._templates.get(pieces)
        if template is not None:
            numbers = _NUMBER.findall(name)
            found = self._expert(template, numbers)
            if found is not None:
                return found
        if self.ignored(name) is not None:
            return None
        return self._ask(name, pieces)

    def module_path(self, name: str) -> str:
        """Return a checkpoint's module name as transformers has it: `block_sparse_moe` is `mlp`."""
        path = f"{name}."
        for renaming in self._renamings:
            path, _ = renaming.rename_source_key(path)
        return path.removesuffix(".")

    def draft_layers(self, names: Iterable[str]) -> frozenset[int]:
        """Return which of a checkpoint's layers are drafts that are numbered like the others.

        The configuration announces them, the family writes them so, and a tensor of theirs shows
        it. Any other layer past the model's own means that configuration and weights differ.

        Args:
            names: All of the checkpoint's tensors.
        """
        if not self.numbered_drafts:
            return frozenset()
        found = (_LAYER.match(name) for name in names)
        marked = frozenset(int(layer[1]) for layer in found if layer and layer[2])
        return marked.intersection(self.numbered_drafts)

    def ignored(self, name: str, *, drafts: Collection[int] = ()) -> Ignored | None:
        """Return why a tensor is left out, or `None` when it is not.

        Args:
            name: Its name.
            drafts: `draft_layers` of its checkpoint.
        """
        layer = _LAYER.match(name) if drafts else None
        if (place := self._draft_place(name)) is not None:
            return Ignored.DRAFT_COPY if place == DRAFT_COPY else None
        unused = _LATER_MTP if self._has_draft else _MTP
        if unused.match(name) or (layer and int(layer[1]) in drafts):
            return Ignored.MTP
        if name.endswith("rotary_emb.inv_freq"):
            return Ignored.ROTARY
        if name in self._tied:
            return Ignored.TIED
        return None

    def tied_to(self, name: str) -> str:
        """Return the weight of the model that a tied one is a copy of; empty for any other name."""
        return self._tied.get(name, "")

    def is_draft(self, name: str) -> bool:
        """Whether a checkpoint's tensor belongs to a draft layer, used or not."""
        layer = _LAYER.match(name)
        return bool(_MTP.match(name) or (layer and int(layer[1]) in self.numbered_drafts))

    def _draft_place(self, name: str) -> str | None:
        if not self._has_draft or not self.is_draft(name):
            return None
        return draft_place(name, first=self._first)

    def _of_draft(self, name: str, place: str) -> Destination | None:
        """Resolve a tensor of a draft's block as the target's last layer has it."""
        if not place.startswith(BLOCK):
            if DRAFT + place not in self._names:
                raise self._unknown(name)
            return DenseDestination(DRAFT + place)
        try:
            found = self.resolve(self._last + place.removeprefix(BLOCK))
        except CheckpointError as error:
            raise self._unknown(name) from error
        if isinstance(found, ExpertDestination):
            return replace(found, layer=found.layer.replace(self._last, DRAFT + BLOCK, 1))
        if found is not None:
            return DenseDestination(found.name.replace(self._last, DRAFT + BLOCK, 1))
        return None

    def _expert(self, template: _Template, numbers: list[str]) -> ExpertDestination | None:
        layer, expert = template.layer.format(*numbers[:-1]), int(numbers[-1])
        stack = self._stacks.get(layer)
        if stack is None or expert >= stack.num_experts:
            return None
        return ExpertDestination(layer=layer, part=template.part, expert=expert)

    def _ask(self, name: str, pieces: tuple[str, ...]) -> Destination:
        """Ask transformers, which takes 30 to 110 µs; remember the template of an expert name."""
        target, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._names
        )
        if target not in self._names:
            raise self._unknown(name)
        layer, _, leaf = target.rpartition(".")
        stack = self._stacks.get(layer)
        if pattern is None:
            return DenseDestination(target) if stack is None else _stacked(layer, leaf, stack)
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        numbers = _NUMBER.findall(name)
        template = _Template(_NUMBER.sub("{}", f"{layer}."), self._part(converter, pattern, leaf))
        template = _Template(template.layer.rstrip("."), template.part)
        ops = {type(op).__name__ for op in converter.operations}
        found = self._expert(template, numbers) if ops <= _NAMED_OPS else None
        if found is None or found.layer != layer:
            raise self._unknown(name)
        self._templates[pieces] = template
        return found

    @staticmethod
    def _part(converter: Any, pattern: str, leaf: str) -> Part | None:
        if leaf == "down_proj":
            return Part.DOWN
        if leaf == "up_proj":
            return Part.UP
        if len(converter.source_patterns) == 1:
            return None
        return (Part.GATE, Part.UP)[converter.source_patterns.index(pattern)]

    def _unknown(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {name!r} has no place in a {self._model_type} model",
            why="no parameter, buffer or expert of the model carries that name",
            fix="check that config.json belongs to these weights",
        )


def _path_of_last_layer(model: PreTrainedModel) -> str:
    last = last_layer(model)
    return next(f"{path}." for path, module in model.named_modules() if module is last)


def _stacked(layer: str, leaf: str, stack: _Stack) -> ExpertDestination:
    bias = leaf.endswith("_bias")
    parts = {"down_proj": Part.DOWN, "up_proj": Part.UP, "gate_up_proj": None}
    part = parts[leaf.removesuffix("_bias")]
    return ExpertDestination(
        layer=layer,
        part=part,
        expert=None,
        bias=bias,
        transposed=stack.transposed and not bias,
        interleaved=stack.interleaved and part is None,
    )


def _stack(module: nn.Module) -> _Stack:
    facts: dict[str, Any] = vars(module)
    down = module.get_parameter("down_proj")
    return _Stack(
        num_experts=down.shape[0],
        gated=facts["has_gate"],
        transposed=facts["is_transposed"],
        interleaved=not facts["is_concatenated"],
    )
