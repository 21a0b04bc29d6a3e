# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: names, shapes and types first, tensors when they are asked for.

A source knows files or tensors, not models. Its headers are complete before a byte of a tensor is
read, so that a checkpoint which does not fit is refused before anything has been written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from tetrarch.config.drafts import scan_draft
from tetrarch.config.headers import TensorHeader as FileHeader
from tetrarch.config.headers import no_weights, read_headers
from tetrarch.config.plan import Plan
from tetrarch.core.courtesy import gently
from tetrarch.models.arrivals import Arrivals, CudaLane, Lane, Segment
from tetrarch.models.shard import Shard

__all__ = [
    "DraftedSource",
    "SafetensorsSource",
    "Source",
    "TensorHeader",
    "TensorSource",
    "open_checkpoint",
    "reading_order",
]

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class TensorHeader(msgspec.Struct, frozen=True):
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

    Tensors are read when they are asked for (`models/shard.py`).

    Args:
        folder: Where they are.
        headers: What `read_headers` says of it, where that is known.

    Raises:
        CheckpointError: No weights, a missing or damaged shard, or an index that does not
            describe its shards.
    """

    def __init__(self, folder: Path | str, headers: Mapping[str, FileHeader] | None = None) -> None:
        self._folder = Path(folder)
        stored = read_headers(self._folder) if headers is None else headers
        self._headers: dict[str, TensorHeader] = {}
        self._offsets: dict[str, int] = {}
        for header in gently(stored.values()):
            dtype = _DTYPES[header.dtype]
            self._headers[header.name] = TensorHeader(header.shape, dtype, header.file)
            self._offsets[header.name] = header.offset
        if not self._headers:
            raise no_weights(self._folder)
        files = sorted({header.file for header in self._headers.values()})
        self._shards = {file: Shard(self._folder / file) for file in files}

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor of every shard."""
        return self._headers

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, in this order, each in memory of its own.

        Raises:
            CheckpointError: A file has changed since it was opened, or cannot be read.
        """
        for name in names:
            header = self._headers[name]
            shard = self._shards[header.file]
            octets = shard.read(name, self._offsets[name], header.num_bytes)
            yield name, octets.view(header.dtype).view(header.shape)

    def fill(self, wanted: Sequence[Segment]) -> None:
        """Read some bytes of some tensors; neighbours in a file come in one call.

        Raises:
            CheckpointError: As `read`.
        """
        file, first, end = "", wanted[0], -1
        run: list[memoryview] = []
        for segment in wanted:
            owner = self._headers[segment.name].file
            offset = self._offsets[segment.name] + segment.start
            if run and (owner, offset) != (file, end):
                self._shards[file].read_into(run, first.name, end - sum(map(len, run)))
                run = []
            if not run:
                file, first = owner, segment
            run.append(segment.view)
            end = offset + len(segment.view)
        self._shards[file].read_into(run, first.name, end - sum(map(len, run)))


class TensorSource:
    """Live tensors under checkpoint names, as a trainer hands them over."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._headers = {
            name: TensorHeader(tuple(tensor.shape), tensor.dtype, "")
            for name, tensor in gently(self._tensors.items())
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


class DraftedSource:
    """A target and a draft that lies elsewhere, as one checkpoint: one load takes both or none.

    Args:
        target: Its own draft, if it has one, is left out.
        draft: Only these of its tensors are taken.
        names: Of the draft's tensors.
        hidden: Of the target's tensors that are left out.
    """

    def __init__(
        self,
        target: SafetensorsSource,
        draft: SafetensorsSource,
        *,
        names: Collection[str],
        hidden: Collection[str],
    ) -> None:
        self._target, self._draft, self._names = target, draft, frozenset(names)
        self._headers = {n: h for n, h in target.headers.items() if n not in hidden}
        self._headers |= {name: draft.headers[name] for name in names}

    @property
    def name(self) -> str:
        """Both folders."""
        return f"{self._target.name}, and its draft from {self._draft.name}"

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor that is taken."""
        return self._headers

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, in this order."""
        for name in names:
            yield from self._of(name).read([name])

    def fill(self, wanted: Sequence[Segment]) -> None:
        """Do as `SafetensorsSource`."""
        for source in (self._target, self._draft):
            if own := [segment for segment in wanted if self._of(segment.name) is source]:
                source.fill(own)

    def _of(self, name: str) -> SafetensorsSource:
        return self._draft if name in self._names else self._target


# How tensors of files reach a device.
_LANES: Mapping[str, Callable[[torch.device], Lane]] = {"cuda": CudaLane}


def _bound_for(device: str, files: SafetensorsSource | DraftedSource) -> Source:
    """Return a source of the same tensors that reads ahead where copies cost time."""
    lane = _LANES.get(device)
    return files if lane is None else Arrivals(files, partial(lane, torch.device(device)))


def open_checkpoint(
    plan: Plan, path: str, headers: Mapping[str, FileHeader] | None = None
) -> Source:
    """Return the tensors of a checkpoint for the model of a plan, its draft's included.

    A draft that lies elsewhere comes from there, unless a checkpoint other than the plan's own
    brings its own.

    Args:
        plan: What was launched.
        path: The plan's checkpoint, or that of an update.
        headers: What `read_headers` says of it, where that is known.

    Raises:
        CheckpointError: No weights, or damaged files.
    """
    headers = read_headers(Path(path)) if headers is None else headers
    target, device = SafetensorsSource(path, headers), plan.device.torch_device
    if plan.spec is None or plan.spec.draft_path is None:
        return _bound_for(device, target)
    layers = plan.model.facts.num_layers
    own = scan_draft(headers, num_layers=layers).names
    if own and path != plan.model.path:
        return _bound_for(device, target)
    draft_headers = read_headers(Path(plan.spec.draft_path))
    draft = SafetensorsSource(plan.spec.draft_path, draft_headers)
    names = scan_draft(draft_headers, num_layers=layers).names
    drafted = DraftedSource(target, draft, names=names, hidden=own)
    return _bound_for(device, drafted)
