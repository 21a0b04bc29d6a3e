# SPDX-License-Identifier: Apache-2.0
"""Weights come back from their packed form bit for bit."""

from __future__ import annotations

import pytest
import torch

from tetrarch.kernels.grouped_gemm import packing

SHAPES = [(3, 32, 64), (2, 80, 48), (1, 128, 128), (2, 272, 16)]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    """Experts, rows, columns; some need padding, some none."""
    return request.param


def random_bytes(*shape: int, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)


def test_codes_come_back_bit_for_bit(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether experts are packed one by one or together."""
    experts, rows, width = shape
    codes = random_bytes(experts, rows, width // 2)
    packed = packing.pack_codes(codes)
    assert packed.dtype == torch.int16
    assert torch.equal(packing.unpack_codes(packed, rows=rows, width=width), codes)
    monkeypatch.setattr(packing, "_CHUNK", 1)
    assert torch.equal(packing.pack_codes(codes), packed)
    assert torch.equal(packing.unpack_codes(packed, rows=rows, width=width), codes)


def test_scales_come_back_bit_for_bit_nan_included(shape: tuple[int, int, int]) -> None:
    experts, rows, width = shape
    scales = random_bytes(experts, rows, width // 16, high=128).view(torch.float8_e4m3fn)
    packed = packing.pack_scales(scales)
    assert packed.dtype == torch.int32
    back = packing.unpack_scales(packed, rows=rows, width=width)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_bits_lie_where_the_kernel_looks_for_them() -> None:
    """A code's BF16 bits are its value times 2**-126, a scale's are its value times 2**-120."""
    code = torch.zeros(1, 1, 32, dtype=torch.uint8)
    code[0, 0, 0] = 0xD  # element 0, -3
    word = int(packing.pack_codes(code)[0, 0, 0, 0]) & 0xFFFF
    assert torch.tensor(word << 16).int().view(torch.float32).item() == -3.0 * 2.0**-126
    scale = torch.tensor([[[2.0**-9, 448.0, 1.5, 0.0]]]).to(torch.float8_e4m3fn)
    word = int(packing.pack_scales(scale)[0, 0, 0]) & 0xFFFFFFFF
    rotated = (word << 8 | word >> 24) & 0xFFFFFFFF
    bits = [word & 0x7F0, word >> 16 & 0x7F0, rotated & 0x7F0, rotated >> 16 & 0x7F0]
    found = [torch.tensor(b << 16).int().view(torch.float32).item() * 2.0**120 for b in bits]
    assert found == [2.0**-9, 448.0, 1.5, 0.0]


def test_eight_rows_of_gate_alternate_with_eight_of_up() -> None:
    gate_up = torch.arange(64).view(1, 64, 1)  # gate 0..31, up 32..63
    mixed = packing.interleave(gate_up)
    assert mixed.flatten()[:24].tolist() == [*range(8), *range(32, 40), *range(8, 16)]
    assert torch.equal(packing.separate(mixed), gate_up)


def test_plain_weights_are_padded_with_zeros_only_where_they_must() -> None:
    small, whole = torch.randn(2, 80, 48), torch.randn(2, 128, 64)
    packed = packing.pack_plain(small)
    assert packed.shape == (2, 128, 64)
    assert packed.count_nonzero() == small.numel()
    assert torch.equal(packing.unpack_plain(packed, rows=80, width=48), small)
    assert packing.pack_plain(whole) is whole
