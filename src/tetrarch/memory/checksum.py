# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors, the same on every device.

They tell whether two sets of weights are the same bytes; they do not withstand a forger. The
arithmetic wraps at 64 bits and adds in any order, so a GPU hashes where the weights are: nothing
is copied to the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["combine", "digest"]

_WORDS = 1 << 18  # 2 MiB a piece: the temporaries stay in a core's cache
_MASK = (1 << 64) - 1
# splitmix64's constants: the golden ratio and two multipliers, as int64.
_STRIDE, _FIRST, _SECOND = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Return 16 hex digits that depend on every byte, its place, the dtype and the shape.

    Args:
        tensor: Any shape, dtype and device.
    """
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(octets) // 8 * 8
    words = [octets[:whole].clone() if octets.data_ptr() % 8 else octets[:whole]]
    if whole < len(octets):
        words.append(torch.nn.functional.pad(octets[whole:], (0, 8 - len(octets) + whole)))
    total = start = 0
    for piece in words:
        for part in piece.view(torch.int64).split(_WORDS):
            total += _sum(part, start)
            start += len(part)
    seal = f"{total & _MASK:016x} {tensor.dtype} {tuple(tensor.shape)}"
    return hashlib.blake2b(seal.encode(), digest_size=8).hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """Return one checksum, 32 hex digits, of named ones; their order does not count."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def _sum(words: Tensor, start: int) -> int:
    """Add up the words, each mixed with its place as splitmix64 does.

    The last step matters: without it, two words whose top bits both change may cancel out.
    """
    mixed = torch.arange(start, start + len(words), device=words.device)
    mixed.mul_(_STRIDE).add_(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        _fold(mixed, shift).mul_(factor)
    return int(_fold(mixed, 31).sum())


def _fold(words: Tensor, shift: int) -> Tensor:
    """`words ^= words >> shift` in place, as if they were unsigned."""
    high = words.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
    return words.bitwise_xor_(high)
