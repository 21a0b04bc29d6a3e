# SPDX-License-Identifier: Apache-2.0
"""How the Triton grouped GEMM stores weights: for cheap decoding, and back bit for bit.

Rows are padded to 128 and columns to 64, so that no tile of weights needs a mask.

Codes: (E, K / 64, N, 16) int16. A word holds the codes of four columns 16 apart, so that each of
the four is the same column of a 16-wide scale group, and unpacking a tile is four elementwise
operations. In a word (bits 15..0):

    s0 s3 l3 s1  h3 h3 s2 m0  m0 m0 m1 m1  m1 m2 m2 m2      s sign, m magnitude (l low bit)

A code whose sign is at bit 15 and whose magnitude is at bits 8..6 is the BF16 number
`code * 2**-126`. Code 0 lies so already, codes 1 and 2 do after a shift by 3 and 6, code 3 is put
together from what is left: 11 instructions decode 8 codes in two words of one register.

Scales: (E, K / 64, N) int32, the four scales of a row. A byte's 7 bits at bit 4 of a half word are
the BF16 number `scale * 2**-120`, zero and subnormal scales included. Scales 0 and 1 lie so in the
word, scales 2 and 3 in the word rotated by 8.

K-blocks come first, so that the tile of a step, rows times 64 columns, is contiguous memory.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from tetrarch.core.units import align_up

__all__ = [
    "K_BLOCK",
    "ROW_BLOCK",
    "interleave",
    "pack_codes",
    "pack_plain",
    "pack_scales",
    "padded",
    "separate",
    "unpack_codes",
    "unpack_plain",
    "unpack_scales",
]

ROW_BLOCK, K_BLOCK = 128, 64  # rows and columns are padded to these
_HALF = 8  # rows of gate, then as many of up: then one thread holds both of a pair
_CHUNK = 1 << 24  # codes in flight while packing: 4 temporary bytes each


def padded(rows: int, width: int) -> tuple[int, int]:
    """Return the stored size of an N x K matrix."""
    return align_up(rows, ROW_BLOCK), align_up(width, K_BLOCK)


def interleave(gate_up: Tensor) -> Tensor:
    """Alternate 8 rows of gate and 8 of up: (E, 2I, ...) to (E, 2I, ...), a copy."""
    experts, rows = gate_up.shape[:2]
    halves = gate_up.reshape(experts, 2, rows // (2 * _HALF), _HALF, *gate_up.shape[2:])
    return halves.transpose(1, 2).reshape(gate_up.shape)


def separate(interleaved: Tensor) -> Tensor:
    """Return all of gate, then all of up: what `interleave` was given."""
    experts, rows = interleaved.shape[:2]
    pairs = interleaved.reshape(experts, rows // (2 * _HALF), 2, _HALF, *interleaved.shape[2:])
    return pairs.transpose(1, 2).reshape(interleaved.shape)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack (E, N, K / 2) uint8, low nibble first, as (E, K / 64, N, 16) int16, padded."""
    experts, rows, half = codes.shape
    n, k = padded(rows, 2 * half)
    packed = torch.empty(experts, k // K_BLOCK, n, 16, dtype=torch.int16, device=codes.device)
    step, tables = max(1, _CHUNK // (n * k)), _word_tables(codes.device)
    for first in range(0, experts, step):
        some = pad(codes[first : first + step], (0, k // 2 - half, 0, n - rows))
        columns = some.view(len(some), n, -1, 4, 8).movedim(3, 0)
        pairs = torch.zeros((), dtype=torch.int32, device=codes.device)
        for table, octets in zip(tables, columns, strict=True):
            pairs = pairs | table.index_select(0, octets.flatten().int())
        words = pairs.view(torch.int16).view(len(some), n, -1, 16)
        packed[first : first + step] = words.transpose(1, 2)
    return packed


@cache
def _word_tables(device: torch.device) -> Tensor:
    """Return (4, 256) int32: what a byte, two neighbours of one of four columns, adds to two words.

    The lower half is the word of the neighbour in the low nibble, and comes first in memory.
    """
    code = torch.arange(16)
    words = torch.stack(
        (
            _place(code, 12, 6),
            _place(code, 9, 3),
            _place(code, 6, 0),
            (code & 8) << 11 | (code & 6) << 9 | (code & 1) << 13,
        )
    )
    pairs = words[:, None, :] | words[:, :, None] << 16  # high nibble, low nibble
    return pairs.flatten(1).to(torch.int32).to(device)


def _place(code: Tensor, sign_shift: int, magnitude_shift: int) -> Tensor:
    return (code & 8) << sign_shift | (code & 7) << magnitude_shift


def unpack_codes(packed: Tensor, *, rows: int, width: int) -> Tensor:
    """Return (E, rows, width / 2) uint8: what `pack_codes` was given, bit for bit."""
    experts, blocks, n, _ = packed.shape
    codes = torch.empty(experts, rows, width // 2, dtype=torch.uint8, device=packed.device)
    step = max(1, _CHUNK // (n * blocks * K_BLOCK))
    for first in range(0, experts, step):
        word = packed[first : first + step, :, :rows].transpose(1, 2).int()
        last = word >> 11 & 8 | word >> 9 & 6 | word >> 13 & 1
        pieces = [
            word >> 12 & 8 | word >> 6 & 7,
            word >> 9 & 8 | word >> 3 & 7,
            word >> 6 & 8 | word & 7,
            last,
        ]
        nibbles = torch.stack(pieces, dim=3).to(torch.uint8).flatten(2)[..., :width]
        codes[first : first + step] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return codes


def pack_scales(block_scale: Tensor) -> Tensor:
    """Pack (E, N, K / 16) e4m3 as (E, K / 64, N) int32, padded."""
    rows, groups = block_scale.shape[1:]
    n, k = padded(rows, 16 * groups)
    bits = pad(block_scale.view(torch.uint8), (0, k // 16 - groups, 0, n - rows)).int()
    b0, b1, b2, b3 = bits.unflatten(2, (-1, 4)).unbind(3)
    word = b0 << 4 | b1 << 20 | b3 << 12 | b2 >> 4 | (b2 & 15) << 28
    return word.transpose(1, 2).contiguous()


def unpack_scales(packed: Tensor, *, rows: int, width: int) -> Tensor:
    """Return (E, rows, width / 16) e4m3: what `pack_scales` was given, bit for bit."""
    word = packed[:, :, :rows].transpose(1, 2)
    third = word >> 28 & 15 | (word & 7) << 4
    bits = torch.stack((word >> 4 & 127, word >> 20 & 127, third, word >> 12 & 127), dim=3)
    groups = bits.to(torch.uint8).flatten(2)[..., : width // 16]
    return groups.contiguous().view(torch.float8_e4m3fn)


def pack_plain(weight: Tensor) -> Tensor:
    """Pad (E, N, K) of any dtype; a weight that needs none is returned as it is."""
    rows, width = weight.shape[1:]
    n, k = padded(rows, width)
    return pad(weight, (0, k - width, 0, n - rows)) if (n, k) != (rows, width) else weight


def unpack_plain(packed: Tensor, *, rows: int, width: int) -> Tensor:
    """Return (E, rows, width) of what `pack_plain` returned, as a view."""
    return packed[:, :rows, :width]
