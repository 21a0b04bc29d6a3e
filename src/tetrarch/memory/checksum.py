# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors, the same on every device.

They tell whether two sets of weights are the same bytes; they do not withstand a forger. The
arithmetic wraps at 64 bits and adds in any order, so a GPU hashes where the weights are: nothing
is copied to the host.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["combine", "digest"]

_WORDS = 1 << 16  # 32-bit words a piece: with their keys they stay in a core's second-level cache
_AT_ONCE = {"cpu": 1}  # pieces; elsewhere launches would cost more than sums
_AT_ONCE_ELSEWHERE = 64  # which takes 32 MiB
# splitmix64's constants: the golden ratio and two multipliers, as int64.
_STRIDE, _FIRST, _SECOND = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Return 16 hex digits that depend on every byte, its place, the dtype and the shape.

    Multilinear hashing: the sum of 32-bit words times 64-bit keys, modulo 2^64, piece by piece.
    Two pieces that differ have the same sum with a probability of 2^-32; pieces are then hashed
    in order.

    Args:
        tensor: Any shape, dtype and device.
    """
    words = _words(tensor.detach())
    sums = torch.cat(_sums(words)).tolist() if len(words) else []
    seal = f"{sums} {tensor.dtype} {tuple(tensor.shape)}"
    return hashlib.blake2b(seal.encode(), digest_size=8).hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """Return one checksum, 32 hex digits, of named ones; their order does not count."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def _sums(words: Tensor) -> list[Tensor]:
    """Return the sum of each piece, in order, in several tensors."""
    keys, rest = _keys(words.device, _WORDS), len(words) % _WORDS
    pieces = words[: len(words) - rest].view(-1, _WORDS)
    at_once = min(_AT_ONCE.get(words.device.type, _AT_ONCE_ELSEWHERE), max(1, len(pieces)))
    # Allocating half a megabyte each time would cost twice the sum.
    products = keys.new_empty(at_once, min(len(keys), len(words)))
    sums = [
        torch.mul(some, keys, out=products[: len(some)]).sum(1) for some in pieces.split(at_once)
    ]
    if rest:
        sums.append(torch.mul(words[-rest:], keys[:rest], out=products[0, :rest]).sum()[None])
    return sums


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes as int32 words, zeros behind them."""
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    if len(octets) % 4:
        return torch.nn.functional.pad(octets, (0, -len(octets) % 4)).view(torch.int32)
    return (octets if octets.storage_offset() % 4 == 0 else octets.clone()).view(torch.int32)


@functools.cache  # half a megabyte; of a small tensor, making them took half the time
def _keys(device: torch.device, count: int) -> Tensor:
    """Return the first numbers of splitmix64: (count,) int64, the same on every device."""
    keys = torch.arange(1, count + 1, device=device).mul_(_STRIDE)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        _fold(keys, shift).mul_(factor)
    return _fold(keys, 31)


def _fold(words: Tensor, shift: int) -> Tensor:
    """`words ^= words >> shift` in place, as if they were unsigned."""
    high = words.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
    return words.bitwise_xor_(high)
