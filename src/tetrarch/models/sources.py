# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: names, shapes and types first, tensors when they are asked for.

A source knows files or tensors, not models. Its headers are complete before a byte of a tensor is
read, so that a checkpoint which does not fit is refused before anything has been written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.models.shard import Shard

__all__ = ["SafetensorsSource", "Source", "TensorHeader", "TensorSource", "reading_order"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a stored tensor is, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str  # the shard that holds it; empty for a live tensor

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source(Protocol):
    """Named tensors from somewhere."""

    @property
    def name(self) -> str:
        """What to call it in an error: the folder, or `live tensors`."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor there is."""
        ...

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, in this order, one at a time."""
        ...


def reading_order(names: Iterable[str]) -> list[str]:
    """Sort names so that numbers count: one layer's tensors are neighbours, and one expert's.

    `layers.2` comes before `layers.10`; a weight's scales follow it. Files need not be in this
    order; a loader that reads in it holds one layer and one weight at a time.
    """
    return sorted(names, key=_natural_key)


def _natural_key(name: str) -> list[tuple[int, str]]:
    words = name.split(".")
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


class SafetensorsSource:
    """The weights of a checkpoint folder: one file, or shards under an index.

    Its files stay open as long as it lives, and a tensor lives as long as somebody holds it.

    Raises:
        CheckpointError: No weights, a missing or damaged shard, or an index that does not
            describe its shards.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._shards: dict[str, Shard] = {}
        self._headers: dict[str, TensorHeader] = {}
        index = _read_index(self._folder)
        shards = [_SINGLE] if index is None else sorted(set(index.values()))
        for shard in shards:
            self._open(shard)
        _check_index(self._folder, index or {}, self._headers)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor of every shard."""
        return self._headers

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, in this order, each read when its turn has come.

        Raises:
            CheckpointError: A file has changed since its header was read, or cannot be read.
        """
        for name in names:
            yield name, self._shards[self._headers[name].file].read(name)

    def _open(self, shard: str) -> None:
        path = self._folder / shard
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing",
                why=f"{_INDEX} names it",
                fix="download the checkpoint again, or copy the shard into the folder",
            )
        self._shards[shard] = opened = Shard(path)
        for name, (shape, dtype) in opened.entries.items():
            if name in self._headers:
                raise CheckpointError(
                    f"{self._folder} holds {name} twice",
                    why=f"it is in {self._headers[name].file} and in {shard}",
                    fix="remove the shard that the index does not name for it",
                )
            self._headers[name] = TensorHeader(shape, dtype, shard)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor → shard, or `None` where one file holds everything."""
    if (folder / _SINGLE).is_file():
        return None
    path = folder / _INDEX
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no safetensors weights",
            why=f"neither {_SINGLE} nor {_INDEX} is there",
            fix="pass the folder of a Hugging Face checkpoint in safetensors format",
        )
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): Path(str(shard)).name for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged",
            why=f"it must be JSON with a weight_map from names to files ({error!r})",
            fix="download the file again",
        ) from error
    return index


def _check_index(folder: Path, index: dict[str, str], headers: dict[str, TensorHeader]) -> None:
    absent = [
        name for name, shard in index.items() if name not in headers or headers[name].file != shard
    ]
    if absent:
        raise CheckpointError(
            f"{folder / _INDEX} names {len(absent)} tensors that their shards do not hold",
            why=", ".join(f"{name} in {index[name]}" for name in reading_order(absent)[:10]),
            fix="download the checkpoint again; index and shards are of different versions",
        )


class TensorSource:
    """Live tensors under checkpoint names, as a trainer hands them over."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._headers = {
            name: TensorHeader(tuple(tensor.shape), tensor.dtype, "")
            for name, tensor in self._tensors.items()
        }

    @property
    def name(self) -> str:
        """`live tensors`."""
        return "live tensors"

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor."""
        return self._headers

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, in this order."""
        for name in names:
            yield name, self._tensors[name]
