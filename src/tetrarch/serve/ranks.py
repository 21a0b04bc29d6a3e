# SPDX-License-Identifier: Apache-2.0
"""The payloads of a tensor update: one base64 string for each tensor-parallel rank."""

from __future__ import annotations

import binascii
from collections.abc import Sequence

from tetrarch.core.errors import RequestError

__all__ = ["MOST_BODY_BYTES", "MOST_BYTES", "decode_ranks"]

_KEY = "serialized_named_tensors"
MOST_BYTES = (1 << 32) - (1 << 16)
"""Of one rank's payload: what msgpack can carry to the engine, less the rest of the message."""
MOST_BODY_BYTES = MOST_BYTES // 3 * 4 + (1 << 20)
"""Of a whole call: base64 of that, and the other fields."""
_PIECE = 1 << 22
"""Characters, in groups of four: 15 ms, during which Python runs nothing else."""


def decode_ranks(encoded: Sequence[str], *, num_ranks: int) -> list[bytes]:
    """Take off the base64.

    Args:
        encoded: As the client sent them.
        num_ranks: Tensor-parallel ranks, each of which gets its own.

    Raises:
        RequestError: Too few or too many, no base64, or too large.
    """
    if len(encoded) != num_ranks:
        raise RequestError(
            f"{_KEY} has {len(encoded)} entries, and tp_size is {num_ranks}",
            why="each tensor-parallel rank reads its own",
            fix=f"send a list of {num_ranks}",
            param=_KEY,
        )
    return [_decode(text, rank) for rank, text in enumerate(encoded)]


def _decode(text: str, rank: int) -> bytes:
    if len(text) // 4 * 3 > MOST_BYTES:
        raise RequestError(
            f"{_KEY}[{rank}] is too large: {len(text) // 4 * 3} bytes",
            why=f"one call carries {MOST_BYTES} at most",
            fix="send the tensors in several calls of smaller buckets, all but the last with "
            '"flush_cache": false',
            param=_KEY,
        )
    try:
        return _join(
            [
                binascii.a2b_base64(text[at : at + _PIECE], strict_mode=True)
                for at in range(0, len(text), _PIECE)
            ]
        )
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise RequestError(
            f"{_KEY}[{rank}] is not base64",
            why=str(error),
            fix="send base64 of the standard alphabet, padded, without line breaks",
            param=_KEY,
        ) from error


def _join(pieces: list[bytes]) -> bytes:
    if any(len(piece) < _PIECE // 4 * 3 for piece in pieces[:-1]):
        raise binascii.Error("Excess data after padding")
    return b"".join(pieces)
