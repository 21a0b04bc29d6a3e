# SPDX-License-Identifier: Apache-2.0
"""How checkpoints name a draft layer, and what their headers say of one.

One table for all families; the names on its right are Qwen3-Next's without the leading `mtp.`,
which are ours. What is inside a block keeps the name it has in the target's layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tetrarch.config.files import is_folder, object_in, read_object
from tetrarch.config.headers import TensorHeader, no_weights, read_headers
from tetrarch.core.courtesy import gently
from tetrarch.core.errors import CheckpointError

__all__ = [
    "BLOCK",
    "DRAFT",
    "DRAFT_COPY",
    "DraftCheckpoint",
    "DraftScan",
    "draft_place",
    "read_draft",
    "scan_draft",
]

DRAFT = "mtp."  # what all our names of a draft begin with
BLOCK = "layers.0."  # what follows there for the tensors of its block
DRAFT_COPY = "copy"  # of the target's embedding or head: known, and not loaded

# {L}: the number of layers of the target, and so the number of the first draft layer. The first
# row that fits counts. In Nemotron-3 a layer is half a block: attention, then experts.
_ROWS: tuple[tuple[str, str], ...] = (
    # DeepSeek-V3, GLM-4.5 and later
    (r"model\.layers\.{L}\.enorm\.(\w+)", r"pre_fc_norm_embedding.\1"),
    (r"model\.layers\.{L}\.hnorm\.(\w+)", r"pre_fc_norm_hidden.\1"),
    (r"model\.layers\.{L}\.eh_proj\.(\w+)", r"fc.\1"),
    (r"model\.layers\.{L}\.shared_head\.norm\.(\w+)", r"norm.\1"),
    (r"model\.layers\.{L}\.(?:shared_head\.head|embed_tokens)\.\w+", DRAFT_COPY),
    (r"model\.layers\.{L}\.(.+)", r"layers.0.\1"),
    # Qwen3-Next, Qwen3.5
    (r"mtp\.(pre_fc_norm_embedding|pre_fc_norm_hidden|fc|norm)\.(\w+)", r"\1.\2"),
    (r"mtp\.(?:embed_tokens|lm_head)\.\w+", DRAFT_COPY),
    # Nemotron-3
    (r"mtp\.layers\.0\.enorm\.(\w+)", r"pre_fc_norm_embedding.\1"),
    (r"mtp\.layers\.0\.hnorm\.(\w+)", r"pre_fc_norm_hidden.\1"),
    (r"mtp\.layers\.0\.eh_proj\.(\w+)", r"fc.\1"),
    (r"mtp\.layers\.1\.final_layernorm\.(\w+)", r"norm.\1"),
    (r"mtp\.layers\.1\.(norm\..+|mixer\..+)", r"layers.1.\1"),
    # both
    (r"mtp\.layers\.0\.(.+)", r"layers.0.\1"),
)
# What a numbered draft layer has and no other layer: it tells a draft from a layer too many.
_MARKS = ("eh_proj.", "enorm.", "hnorm.", "shared_head.")
_NOT_VALUES = ("scale", "bias", "amax")  # in the last word of an expert tensor's name


@functools.cache
def _rows(first: int) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(row.replace("{L}", str(first))), place) for row, place in _ROWS)


def draft_place(name: str, *, first: int) -> str | None:
    """Return what the first draft layer calls a checkpoint's tensor.

    Args:
        name: The checkpoint's.
        first: Number of layers of the target.

    Returns:
        Our name without `DRAFT`; `DRAFT_COPY`; `None` where it has no such tensor.
    """
    if not name.startswith((DRAFT, f"model.layers.{first}.")):
        return None
    for row, place in _rows(first):
        if (found := row.fullmatch(name)) is not None:
            return found.expand(place)
    return None


@dataclass(frozen=True, slots=True)
class DraftScan:
    """The first draft layer of a checkpoint, from its headers.

    Attributes:
        names: Checkpoint's name of each tensor → ours.
        experts: Name of each expert matrix → its header.
        linears: Types of its other matrices.
    """

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: Mapping[str, TensorHeader] = field(default_factory=dict[str, TensorHeader])
    linears: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def layers(self) -> frozenset[str]:
        """What a pattern may call the experts: the checkpoint's path and ours."""
        paths = {name.partition(".experts.")[0] for name in self.experts}
        ours = {DRAFT + self.names[name].partition(".experts.")[0] for name in self.experts}
        return frozenset(f"{path}.experts" for path in paths | ours)


def scan_draft(headers: Mapping[str, TensorHeader], *, num_layers: int) -> DraftScan:
    """Find the first draft layer; empty where there is none.

    Args:
        headers: A whole checkpoint's, or of a draft alone.
        num_layers: Of the target.
    """
    numbered = f"model.layers.{num_layers}."
    found = {name for name in gently(headers) if name.startswith((DRAFT, numbered))}
    if not any(name.startswith(tuple(numbered + mark for mark in _MARKS)) for name in found):
        found = {name for name in found if not name.startswith(numbered)}
    places = {name: draft_place(name, first=num_layers) for name in headers if name in found}
    names = {name: place for name, place in places.items() if place not in (None, DRAFT_COPY)}
    matrices = {
        name: headers[name]
        for name in names
        if not any(word in name.rpartition(".")[2] for word in _NOT_VALUES)
        and len(headers[name].shape) >= 2
    }
    experts = {name: header for name, header in matrices.items() if ".experts." in name}
    return DraftScan(
        names={name: str(place) for name, place in names.items()},
        experts=experts,
        linears=frozenset(matrices[name].dtype for name in matrices.keys() - experts.keys()),
    )


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A folder that holds a draft: with its target, or alone.

    Attributes:
        path: The folder.
        fields: Of its `config.json`, where it has one, those that tell its model.
        draft: Its first draft layer.
    """

    path: str
    fields: Mapping[str, object]
    draft: DraftScan


def read_draft(path: str, *, num_layers: int) -> DraftCheckpoint:
    """Describe a folder that was named as a draft's.

    Args:
        path: The folder.
        num_layers: Of the target.

    Raises:
        CheckpointError: There is no such folder, it holds no weights, or a file is damaged.
    """
    folder = Path(path)
    if not is_folder(folder):
        raise CheckpointError(
            f"there is no draft folder {path!r}",
            why="--speculative-draft-model-path names a checkpoint, or a folder with MTP tensors",
            fix="check the path",
        )
    headers = read_headers(folder)
    if not headers:
        raise no_weights(folder)
    config = read_object(folder / "config.json") or {}
    text = object_in(config, "text_config")
    sources = {"model_type": config, "hidden_size": text or config, "vocab_size": text or config}
    fields = {key: source[key] for key, source in sources.items() if key in source}
    return DraftCheckpoint(path, fields, scan_draft(headers, num_layers=num_layers))
