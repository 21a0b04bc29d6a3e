# SPDX-License-Identifier: Apache-2.0
"""What a trainer announces before it broadcasts: names, dtypes and shapes, checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrarch.core.errors import RequestError

__all__ = ["Piece", "announced", "cut", "pieces", "seal"]

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_LIMIT = 2**62
# The bits of a NaN that no arithmetic gives, and so no weight has; little-endian.
_NANS: dict[torch.dtype, bytes] = {
    torch.float64: bytes.fromhex("a5a5a5a5a5a5f57f"),
    torch.float32: bytes.fromhex("a5a5a57f"),
    torch.float16: bytes.fromhex("a57d"),
    torch.bfloat16: bytes.fromhex("a57f"),
    torch.float8_e4m3fn: b"\xff",
    torch.float8_e5m2: b"\xfd",
    torch.float8_e8m0fnu: b"\xff",
}
_RANDOM_SEAL = 8  # bytes; the same by accident once in 2^64


@dataclass(frozen=True)
class Piece:
    """One announced tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def pieces(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[Piece]:
    """Return what is announced.

    Raises:
        RequestError: The lists differ in length, a name is there twice, or a dtype or a shape is
            none.
    """
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise _error(
            f"there are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes", "names"
        )
    if len(set(names)) != len(names):
        raise _error("a name is there twice", "names")
    return [
        Piece(name, _dtype(dtype), _shape(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def announced(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Return tensors on `meta` that stand for what is announced; raise as `pieces`."""
    return {
        piece.name: torch.empty(piece.shape, dtype=piece.dtype, device="meta")
        for piece in pieces(names, dtypes, shapes)
    }


def _dtype(text: str) -> torch.dtype:
    dtype = _DTYPES.get(text.removeprefix("torch."))
    if dtype is None:
        raise _error(f"{text[:80]!r} is no dtype; there are {', '.join(_DTYPES)}", "dtypes")
    return dtype


def _shape(lengths: Sequence[int]) -> tuple[int, ...]:
    elements = 1
    for length in lengths:
        if type(length) is not int or length < 0:
            raise _error(f"a shape holds {str(length)[:80]!r}", "shapes")
        elements *= max(length, 1)
    if len(lengths) > 64 or elements * 8 >= _LIMIT:
        raise _error("a shape is larger than any tensor", "shapes")
    return tuple(lengths)


def seal(piece: Piece) -> bytes:
    """Return bytes in which a tensor cannot end; none where any end is possible.

    Integers may end in anything; no sender knows eight bytes that are drawn for each call.
    """
    if piece.dtype in _NANS:
        return _NANS[piece.dtype] if piece.num_bytes else b""
    return os.urandom(_RANDOM_SEAL) if piece.num_bytes >= _RANDOM_SEAL else b""


def cut(expected: Sequence[Piece], buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors that lie in the buffers.

    Args:
        expected: What was announced.
        buffers: uint8 `[bytes]`: one for each piece, or one that holds all, end to end.
    """
    if len(buffers) == len(expected):
        parts: Iterator[Tensor] = iter(buffers)
    else:
        parts = iter(buffers[0].split([piece.num_bytes for piece in expected]))
    return {piece.name: _typed(part, piece) for piece, part in zip(expected, parts, strict=True)}


def _typed(part: Tensor, piece: Piece) -> Tensor:
    if part.storage_offset() % piece.dtype.itemsize:
        part = part.clone()  # torch views bytes as a wider dtype only where they are aligned
    return part.view(piece.dtype).view(piece.shape)


def _error(why: str, param: str) -> RequestError:
    return RequestError(
        "the announced tensors cannot be received",
        why=why,
        fix="send one name, dtype such as bfloat16 and shape for every tensor that is broadcast",
        param=param,
    )
