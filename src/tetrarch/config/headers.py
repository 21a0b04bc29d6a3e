# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files say about their tensors, read from safetensors headers alone."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tetrarch.core.errors import CheckpointError

__all__ = ["TensorHeader", "WeightScan", "read_header", "scan_weights"]

_MAX_HEADER = 100_000_000  # the format's own limit, bytes
_PACKED = "U8"  # two E2M1 codes a byte
_FP8 = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file, unread."""

    name: str
    dtype: str  # the format's own name: BF16, F32, F8_E4M3, U8, …
    shape: tuple[int, ...]
    num_bytes: int

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


def read_header(path: Path) -> Iterator[TensorHeader]:
    """Yield the tensors of one file, in the order of its header.

    Raises:
        CheckpointError: The file is not safetensors, or is cut short.
    """
    try:
        entries = list(_entries(path))
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file",
            why=str(error) or "its header cannot be read",
            fix="download the file again; a small text file in its place is a git-lfs pointer "
            "(`git lfs pull`)",
        ) from None
    yield from entries


def _entries(path: Path) -> Iterator[TensorHeader]:
    for name, entry in _header(path).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield TensorHeader(name, entry["dtype"], tuple(entry["shape"]), last - first)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MAX_HEADER, path.stat().st_size - 8):
            raise ValueError(f"it names a header of {length} bytes, which the file does not hold")
        return json.loads(file.read(length))


def scan_weights(folder: Path) -> WeightScan:
    """Count the tensors of `model.safetensors` or of its shards; all zeros without either.

    Whether the shards are complete is found out when they are loaded.

    Raises:
        CheckpointError: A file is not safetensors.
    """
    by_dtype: Counter[str] = Counter()
    dense_elements = dense_bytes = 0
    single = folder / "model.safetensors"
    shards = [single] if single.is_file() else sorted(folder.glob("model*-of-*.safetensors"))
    for path in shards:
        for tensor in read_header(path):
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
