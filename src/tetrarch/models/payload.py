# SPDX-License-Identifier: Apache-2.0
"""What trainers post to `/update_weights_from_tensor`, as tensors of our own.

Trainers written for SGLang send what torch's ForkingPickler makes of their tensors: names, and
places in shared memory. Either each tensor for itself, or one flat tensor with a list of what lies
where in it (a bucket).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from tetrarch.core.courtesy import gently
from tetrarch.core.errors import RequestError
from tetrarch.models.borrowed import View, count, owned, sizes
from tetrarch.models.rebuilds import BUCKET_PART, RANK_TENSORS, Rebuilds
from tetrarch.models.unpickle import Record, refused, shown

__all__ = ["decode_payload"]

_MAX_NAME = 1024
_FORMATS = (None, "direct", "flattened_bucket")


def decode_payload(data: bytes, load_format: str | None) -> dict[str, Tensor]:
    """Return the tensors of one rank's payload.

    Args:
        data: The pickle, its base64 taken off.
        load_format: `None` or `"direct"`: pairs (name, tensor), or a dict of them.
            `"flattened_bucket"`: a dict of `flattened_tensor` and `metadata`.

    Returns:
        Checkpoint name → tensor, in the payload's order, on the device it was sent from, detached.
        The tensors outlive the sender; those that shared a storage share a copy of it.

    Raises:
        RequestError: The format is none of ours, the payload names a global that tensors do not
            need, or it is damaged, or it claims memory that is not there. Nothing that the payload
            names was called.
    """
    if load_format not in _FORMATS:
        raise RequestError(
            f"load_format {shown(str(load_format))} is not supported",
            why="a server does not import loaders by the name that a client sends",
            fix='leave load_format out, or send "direct" or "flattened_bucket"',
            param="load_format",
        )
    rebuilds = Rebuilds(len(data))
    payload = rebuilds.read(data)
    if load_format == "flattened_bucket":
        return _unflatten(payload)
    tensors = {name: _one(name, value, rebuilds) for name, value in gently(_pairs(payload))}
    return dict(zip(tensors, owned(list(tensors.values())), strict=True))


def _pairs(payload: object) -> list[tuple[str, object]]:
    if isinstance(payload, dict):
        listed: Iterable[object] = cast("dict[str, object]", payload).items()
    elif isinstance(payload, list | tuple):
        listed = cast("Sequence[object]", payload)
    else:
        raise refused("it is neither a list of (name, tensor) pairs nor a dict")
    pairs: dict[str, object] = {}
    for pair in gently(listed):
        match pair:
            case (str(name), value):
                _check_name(name, pairs)
                pairs[name] = value
            case _:
                raise refused("its list holds something that is no (name, tensor) pair")
    return list(pairs.items())


def _check_name(name: str, taken: Iterable[str]) -> None:
    if not (0 < len(name) <= _MAX_NAME and name.isprintable()):
        raise refused(f"{shown(name)} is no tensor name")
    if name in taken:
        raise refused(f"{shown(name)} is there twice", fix="send every tensor once")


def _one(name: str, value: object, rebuilds: Rebuilds) -> View:
    """Return the tensor, which may itself be pickled once per rank; this server is rank 0."""
    if isinstance(value, Record) and value.name == RANK_TENSORS:
        ranks = value.fields.get("values")
        first = cast("list[object]", ranks)[:1] if isinstance(ranks, list) else []
        if len(first) != 1 or not isinstance(first[0], bytes):
            raise refused(f"{shown(name)} holds no pickled tensor of rank 0")
        value = rebuilds.read(first[0])
    if not isinstance(value, View):
        raise refused(
            f"{shown(name)} is no tensor",
            fix="send tensors; a bucket needs load_format flattened_bucket",
        )
    return value


@dataclass(frozen=True)
class _Part:
    """One tensor of a bucket: where it lies, in elements of the flat tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


def _unflatten(payload: object) -> dict[str, Tensor]:
    match payload:
        case {"flattened_tensor": View() as seen, "metadata": [*listed]} if len(seen.size) == 1:
            pass
        case _:
            raise refused("it is no bucket: a dict of a flat flattened_tensor and its metadata")
    parts: dict[str, _Part] = {}
    for item in gently(cast("list[object]", listed)):
        part = _part(item, seen)
        _check_name(part.name, parts)
        parts[part.name] = part
    _check_apart(sorted(parts.values(), key=lambda part: (part.start, part.end)))
    flat = owned([seen])[0].contiguous()
    return {name: _cut(flat, part) for name, part in gently(parts.items())}


def _part(item: object, flat: View) -> _Part:
    """Read one entry of the metadata.

    Clients count elements of the flat tensor: bytes since buckets hold several dtypes, elements of
    the one dtype before that.
    """
    if not (isinstance(item, Record) and item.name == BUCKET_PART):
        raise refused(f"its metadata holds something that is no {BUCKET_PART}")
    fields = item.fields
    name, dtype, shape = fields.get("name"), fields.get("dtype"), sizes(fields.get("shape"))
    start, end, numel = (count(fields.get(key)) for key in ("start_idx", "end_idx", "numel"))
    if not (isinstance(name, str) and isinstance(dtype, torch.dtype)):
        raise refused("its metadata lacks a name or a dtype")
    if not (start <= end <= flat.numel and numel == end - start):
        raise refused(
            f"{shown(name)} lies at {start} to {end} ({numel} long) of a bucket of {flat.numel}"
        )
    needed = dtype.itemsize
    for length in shape:
        needed *= length
    if needed != numel * flat.dtype.itemsize:
        raise refused(
            f"{shown(name)} of {shape} {dtype} needs {needed} bytes; the bucket has "
            f"{numel * flat.dtype.itemsize}"
        )
    return _Part(name, shape, dtype, start, end)


def _check_apart(parts: Sequence[_Part]) -> None:
    for before, after in pairwise(parts):
        if after.start < before.end:
            raise refused(f"{shown(before.name)} and {shown(after.name)} overlap")


def _cut(flat: Tensor, part: _Part) -> Tensor:
    piece = flat[part.start : part.end]
    if piece.data_ptr() % part.dtype.itemsize:  # a view would not be aligned; a copy is
        piece = piece.clone()
    return piece.view(part.dtype).view(part.shape)
