# SPDX-License-Identifier: Apache-2.0
"""Slots go to their experts' blocks, and rows come home in slot order: the torch definition's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tetrarch.kernels.grouped_gemm.tiles import max_blocks
from tetrarch.kernels.permute import reference

kernels: Any = pytest.importorskip(
    "tetrarch.kernels.permute.triton", reason="pip install tetrarch[test-kernels]"
)

UNWRITTEN = -77
# tokens, experts a token, experts of the model, first and number of this rank's, block
CASES = [
    (5, 2, 8, (0, 8), 16),
    (1, 8, 24, (0, 24), 16),
    (17, 3, 6, (2, 3), 16),
    (40, 7, 9, (0, 9), 32),
    (3, 2, 8, (7, 1), 64),
    (150, 2, 20, (0, 20), 16),
]
LARGE = [
    (4096, 8, 128, (0, 128), 64),
    (1023, 22, 512, (0, 512), 128),
    (2048, 8, 256, (64, 32), 128),
    (16384, 8, 128, (0, 128), 128),
]


def aligned(ids: Tensor, *, first: int, count: int, block: int, once: bool = False) -> Any:
    """Align into the smallest room that is promised to be enough; count `once` where asked to."""
    most, size = max_blocks(ids.numel(), count, block), kernels.counts_size(ids.numel(), count)
    out = kernels.Alignment(
        sorted_slots=ids.new_full((most * block,), UNWRITTEN, dtype=torch.int32),
        expert=ids.new_full((most,), UNWRITTEN, dtype=torch.int32),
        num_blocks=ids.new_full((1,), UNWRITTEN, dtype=torch.int32),
        owned=ids.new_zeros(ids.numel(), dtype=torch.bool),
        counts=ids.new_full((size,), UNWRITTEN, dtype=torch.int32) if once else None,
    )
    kernels.align(ids, first_expert=first, num_experts=count, block_tokens=block, out=out)
    return out


def expected(ids: Tensor, *, first: int, count: int, block: int) -> tuple[list[int], list[int]]:
    """The reference's sorted slots, padded, and the expert of each block."""
    order = reference.permute(ids, first_expert=first, num_experts=count)
    positions = iter(order.position.tolist())
    slots: list[int] = []
    experts: list[int] = []
    for expert, rows in order.counts:
        blocks = -(-rows // block)
        slots += [next(positions) for _ in range(rows)]
        slots += [ids.numel()] * (blocks * block - rows)
        experts += [expert] * blocks
    return slots, experts


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_the_references_padded_to_blocks(
    device: torch.device, dtype: torch.dtype, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of other ranks, and -1 for no token at all, in between."""
    if once:
        monkeypatch.setattr(kernels, "_COUNTED_ONCE", 0)
        if device.type != "cuda":
            monkeypatch.setattr(kernels, "_CHUNK", 32)
    for tokens, top_k, num_experts, (first, count), block in CASES + (
        LARGE if device.type == "cuda" else []
    ):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, num_experts, (tokens, top_k), generator=generator)
        ids = ids.to(device, dtype)
        out = aligned(ids, first=first, count=count, block=block, once=once)
        slots, experts = expected(ids, first=first, count=count, block=block)
        used = int(out.num_blocks)
        assert out.expert[:used].tolist() == experts
        assert out.sorted_slots[: used * block].tolist() == slots
        mine = (ids >= first) & (ids < first + count)
        assert torch.equal(out.owned, mine.flatten())


def test_the_promised_room_is_enough_for_one_row_in_every_expert(device: torch.device) -> None:
    """The worst case: each block holds one row. And the other: one expert gets all."""
    for ids in (torch.arange(12).view(6, 2), torch.full((6, 2), 3)):
        out = aligned(ids.to(device), first=0, count=12, block=16)
        slots, experts = expected(ids, first=0, count=12, block=16)
        assert int(out.num_blocks) == len(experts)
        assert out.sorted_slots[: len(slots)].tolist() == slots


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_local_rows_are_no_blocks(device: torch.device, tokens: int) -> None:
    out = aligned(torch.full((tokens, 2), 9, device=device), first=0, count=4, block=16)
    assert int(out.num_blocks) == 0
    assert not out.owned.any()
    assert (out.sorted_slots == UNWRITTEN).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tokens_sum_has_the_references_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Rows come in the result's dtype, or wider; rows of other ranks hold NaN."""
    shapes = [(1, 2, 16), (7, 3, 48), (3, 8, 272)]
    if device.type == "cuda":
        shapes += [(33, 22, 1024), (700, 8, 2048), (5, 8, 7168)]
    for tokens, top_k, hidden in shapes:
        generator = torch.Generator().manual_seed(hidden)
        ids = torch.randint(0, 9, (tokens, top_k), generator=generator)
        weights = torch.rand(tokens, top_k, generator=generator)
        rows = torch.randn(tokens * top_k, hidden, generator=generator)
        order = reference.permute(ids, first_expert=2, num_experts=5)
        want = reference.finalize(rows[order.position], order, topk_weights=weights, dtype=dtype)
        owned = ((ids >= 2) & (ids < 7)).flatten()
        rows[~owned] = float("nan")
        for stored in (rows, rows.to(dtype)):
            out = torch.empty(tokens, hidden, dtype=dtype, device=device)
            kernels.finalize(
                stored.to(device),
                topk_weights=weights.to(device),
                owned=owned.to(device),
                out=out,
            )
            assert torch.equal(out.cpu(), want)
            assert torch.equal(out.cpu().signbit(), want.signbit())


def test_slots_are_added_in_ascending_order(device: torch.device) -> None:
    """1e8 + 1 - 1e8 is 0 in FP32 from left to right, and 1e8 - 1e8 + 1 is 1."""
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1e8], [-1e8], [1.0]], device=device)
    out = torch.empty(2, 1, device=device)
    owned = torch.ones(6, dtype=torch.bool, device=device)
    kernels.finalize(rows, topk_weights=torch.ones(2, 3, device=device), owned=owned, out=out)
    assert out.tolist() == [[0.0], [1.0]]


def test_no_tokens_are_no_launch(device: torch.device) -> None:
    out = torch.empty(0, 16, device=device)
    owned = torch.empty(0, dtype=torch.bool, device=device)
    kernels.finalize(out, topk_weights=torch.ones(0, 2, device=device), owned=owned, out=out)
    assert out.shape == (0, 16)
