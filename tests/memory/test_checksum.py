# SPDX-License-Identifier: Apache-2.0
"""A digest depends on every byte and on where it is, and on nothing else."""

from __future__ import annotations

import hashlib

import pytest
import torch

from tetrarch.memory import checksum
from tetrarch.memory.checksum import combine, digest


def test_the_digest_equals_its_definition_in_python_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64-bit wraparound arithmetic is the same on every device because this is what it computes."""
    monkeypatch.setattr(checksum, "_WORDS", 3)
    values = torch.randint(0, 256, (61,), dtype=torch.uint8, generator=torch.manual_seed(0))
    octets, mask = bytes(values.tolist()) + bytes(3), (1 << 64) - 1
    sums: list[int] = []
    for start in range(0, 64, 12):  # three words of four bytes
        total = 0
        for place in range(start, min(start + 12, 64), 4):
            key = ((place - start) // 4 + 1) * 0x9E3779B97F4A7C15 & mask
            key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & mask
            key = (key ^ key >> 27) * 0x94D049BB133111EB & mask
            word = int.from_bytes(octets[place : place + 4], "little", signed=True)
            total += word * (key ^ key >> 31)
        sums.append((total + (1 << 63)) % (1 << 64) - (1 << 63))
    seal = f"{sums} torch.uint8 (61,)"
    assert digest(values) == hashlib.blake2b(seal.encode(), digest_size=8).hexdigest()


def test_every_single_bit_counts() -> None:
    values = torch.arange(40, dtype=torch.uint8)
    seen = {digest(values)}
    for place in range(40):
        for bit in range(8):
            changed = values.clone()
            changed[place] ^= 1 << bit
            seen.add(digest(changed))
    assert len(seen) == 1 + 40 * 8


def test_two_changes_do_not_cancel_out() -> None:
    """Pairs of signs, the likeliest pair of changes: top bits of two 64-bit words."""
    values = torch.randn(64, dtype=torch.float64, generator=torch.manual_seed(0))
    seen = {digest(values)}
    for one in range(64):
        for other in range(one):
            changed = values.clone()
            changed[[one, other]] *= -1
            seen.add(digest(changed))
    assert len(seen) == 1 + 64 * 63 // 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16])
def test_the_order_counts(dtype: torch.dtype) -> None:
    values = torch.arange(64).to(dtype)
    assert digest(values) != digest(values.flip(0))
    assert digest(values) != digest(values.roll(32))


def test_shape_and_type_count_as_well() -> None:
    zeros = torch.zeros(8, dtype=torch.uint8)
    others = [zeros.view(2, 4), zeros.view(torch.int64), torch.zeros(16, dtype=torch.uint8)]
    assert len({digest(t) for t in (zeros, *others)}) == 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.empty(0),
        torch.ones(3, 5).to(torch.float8_e4m3fn),
        torch.ones(7, dtype=torch.bool),
        torch.arange(24.0).view(4, 6).T,
        torch.arange(100, dtype=torch.uint8)[3:90],  # not aligned to a word
    ],
)
def test_layout_and_alignment_do_not_count(tensor: torch.Tensor) -> None:
    assert digest(tensor) == digest(tensor.contiguous().clone())


def test_bits_count_rather_than_values() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())


def test_a_combination_depends_on_names_and_not_on_order() -> None:
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert combine(one) == combine(other)
    assert len({combine(one), combine({"a": "2", "b": "1"}), combine({"a": "1"})}) == 3


@pytest.mark.parametrize("at_once", [2, 3, 64])
def test_pieces_summed_together_have_the_same_digest(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(checksum, "_WORDS", 5)
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (0, 1, 19, 20, 21, 100, 123, 200)]
    alone = [digest(tensor) for tensor in tensors]
    monkeypatch.setattr(checksum, "_AT_ONCE", {"cpu": at_once})
    assert [digest(tensor) for tensor in tensors] == alone
