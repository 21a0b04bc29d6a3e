# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files say about their tensors, read from safetensors headers alone.

Everything that can be wrong with the files, short of the numbers in them, is found here.
"""

from __future__ import annotations

import gc
import json
import math
import struct
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from tetrarch.config.files import is_file, open_file, read_object
from tetrarch.core.courtesy import gently
from tetrarch.core.errors import CheckpointError

__all__ = [
    "TensorHeader",
    "WeightScan",
    "no_weights",
    "read_header",
    "read_headers",
    "scan_weights",
]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit, bytes
_SHOWN = 10  # names in an error
_PACKED = "U8"  # two E2M1 codes a byte
_FP8 = "F8_E4M3"
_BYTES = {  # of one element
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}


class TensorHeader(msgspec.Struct, frozen=True):  # made ten times faster than a dataclass
    """One tensor of a file, unread."""

    name: str
    dtype: str  # the format's own name: BF16, F32, F8_E4M3, U8, …
    shape: tuple[int, ...]
    num_bytes: int
    file: str  # the shard that holds it
    offset: int  # of its first byte in that file

    @property
    def is_quantized_matrix(self) -> bool:
        """Whether this is the codes of a quantized matrix (not its scales)."""
        is_code = self.dtype == _PACKED or (self.dtype == _FP8 and not self.name.endswith("_scale"))
        return is_code and len(self.shape) >= 2

    @property
    def num_elements(self) -> int:
        """Numbers that the tensor stands for; a packed byte holds two."""
        return self.num_bytes * 2 if self.dtype == _PACKED else self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScan:
    """A checkpoint's tensors, counted.

    Attributes:
        num_bytes: All tensors together.
        dtype: The type that most bytes have, as the format names it; empty without weights.
        dense_elements: Numbers in quantized matrices outside the experts.
        dense_bytes: Bytes that these matrices take in the files, their scales aside.
    """

    num_bytes: int = 0
    dtype: str = ""
    dense_elements: int = 0
    dense_bytes: int = 0


def scan_weights(headers: Mapping[str, TensorHeader]) -> WeightScan:
    """Count the tensors of a checkpoint; all zeros where there are none."""
    by_dtype: Counter[str] = Counter()
    dense_elements = dense_bytes = 0
    for tensor in gently(headers.values()):
        by_dtype[tensor.dtype] += tensor.num_bytes
        if tensor.is_quantized_matrix and ".experts." not in tensor.name:
            dense_elements += tensor.num_elements
            dense_bytes += tensor.num_bytes
    return WeightScan(
        num_bytes=by_dtype.total(),
        dtype=by_dtype.most_common(1)[0][0] if by_dtype else "",
        dense_elements=dense_elements,
        dense_bytes=dense_bytes,
    )


@contextmanager
def _without_collector() -> Generator[None]:
    """Make objects that all stay: walking them over and over would be a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collector()
def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return every tensor of `model.safetensors`, or of the shards that the index names.

    Nothing where the folder has neither of the two.

    Raises:
        CheckpointError: The index is damaged or leads out of the folder, a shard is missing or
            damaged, a tensor is there twice, or index and shards do not agree.
    """
    single = is_file(folder / _SINGLE)
    index = {} if single else _read_index(folder)
    headers: dict[str, TensorHeader] = {}
    for shard in [_SINGLE] if single else sorted(set(index.values())):
        for header in gently(read_header(folder / shard)):
            other = headers.setdefault(header.name, header)
            if other is not header:
                raise CheckpointError(
                    f"{folder} holds {header.name} twice",
                    why=f"it is in {other.file} and in {shard}",
                    fix="remove the shard that the index does not name for it",
                )
    _check_index(folder, index, headers)
    return headers


def no_weights(folder: Path) -> CheckpointError:
    """Say that a folder holds no tensor."""
    return CheckpointError(
        f"{folder} holds no safetensors weights",
        why=f"neither {_SINGLE} nor {_INDEX} with its shards is there, or they are empty",
        fix="pass the folder of a Hugging Face checkpoint in safetensors format",
    )


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor → shard; nothing where there is no index."""
    path = folder / _INDEX
    content = read_object(path)
    if content is None:
        return {}
    weight_map: object = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged_index(path, "it has no weight_map from tensors to files")
    index = cast("dict[str, object]", weight_map)
    for name, shard in gently(index.items()):
        if not isinstance(shard, str) or not shard:
            raise _damaged_index(path, f"it puts {name} into {shard!r}, which is no file name")
    found = cast("dict[str, str]", index)
    for shard, name in {shard: name for name, shard in found.items()}.items():  # few of many
        if Path(shard).name != shard or shard == "..":
            raise _damaged_index(path, f"it puts {name} into {shard}, outside the folder")
    return found


def _damaged_index(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged", why=why, fix="download the file again")


def _check_index(
    folder: Path, index: Mapping[str, str], headers: Mapping[str, TensorHeader]
) -> None:
    absent = [
        name
        for name, shard in gently(index.items())
        if name not in headers or headers[name].file != shard
    ]
    if absent:
        raise CheckpointError(
            f"{folder / _INDEX} names {len(absent)} tensors that their shards do not hold",
            why=", ".join(f"{name} in {index[name]}" for name in sorted(absent)[:_SHOWN]),
            fix="download the checkpoint again; index and shards are of different versions",
        )


def read_header(path: Path) -> list[TensorHeader]:
    """Return the tensors of one file, in the order of its header.

    Raises:
        CheckpointError: The file is missing or not safetensors, is cut short, or holds tensors of
            a type that torch lacks.
    """
    if not is_file(path):
        raise CheckpointError(
            f"{path} is missing",
            why=f"{_INDEX} names it; a link that leads nowhere is no file",
            fix="download the checkpoint again, or copy the shard into the folder",
        )
    try:
        header, data = _header(path)
        name = path.name
        tensors = [_tensor(key, entry, name, data.start) for key, entry in gently(header.items())]
        _check_offsets(tensors, data)
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged",
            why=str(error) or "its header cannot be read",
            fix="check its permissions"
            if isinstance(error, PermissionError)
            else "download the file again; a small text file in its place is a git-lfs pointer "
            "(`git lfs pull`)",
        ) from error
    return tensors


def _header(path: Path) -> tuple[dict[str, Any], range]:
    """Return the header without its metadata, and where the bytes of tensors are."""
    with open_file(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        rest = path.stat().st_size - 8
        if length > min(_MAX_HEADER, rest):
            raise ValueError(f"it names a header of {length} bytes, which the file does not hold")
        header: object = json.loads(str(file.read(length), "utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    tensors = cast("dict[str, Any]", header)
    tensors.pop("__metadata__", None)
    return tensors, range(8 + length, 8 + rest)


def _tensor(name: str, entry: Any, file: str, start: int) -> TensorHeader:
    """Return a tensor whose file's data begin at byte `start`; fifty thousand take 0.1 s."""
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"its header does not say what {name} is") from error
    if type(dtype) is not str or type(first) is not int or type(last) is not int:
        raise ValueError(f"its header does not say what {name} is")
    if not set(map(type, shape)) <= {int} or min(shape, default=0) < 0:
        raise ValueError(f"its header gives {name} the shape {shape}")
    if dtype not in _BYTES:
        raise CheckpointError(
            f"{name} in {file} is of type {dtype}",
            why="torch has no such element type",
            fix="convert the checkpoint to BF16, FP8 (E4M3) or NVFP4",
        )
    if last - first != (num_bytes := math.prod(shape) * _BYTES[dtype]):
        raise ValueError(f"{name} takes {num_bytes} bytes, and its header gives it {last - first}")
    return TensorHeader(name, dtype, shape, num_bytes, file, start + first)


def _check_offsets(tensors: list[TensorHeader], data: range) -> None:
    """Tensors stand side by side from the first byte to the last."""
    end = data.start
    for first, num_bytes in sorted((tensor.offset, tensor.num_bytes) for tensor in tensors):
        if first != end:
            at = min(first, end) - data.start
            raise ValueError(f"its tensors overlap or leave a gap at byte {at}")
        end += num_bytes
    if end != data.stop:
        named, there = end - data.start, len(data)
        raise ValueError(f"its header names {named} bytes of tensors, and {there} are there")
