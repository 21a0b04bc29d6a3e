# SPDX-License-Identifier: Apache-2.0
"""Rows go to their experts and come home in slot order."""

from __future__ import annotations

import pytest
import torch

from tetrarch.kernels.permute.reference import finalize, permute

DTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "count"), [(0, 6), (0, 2), (2, 3), (5, 1)])
def test_rows_are_sorted_by_expert_then_token(dtype: torch.dtype, first: int, count: int) -> None:
    """Against a plain Python loop, with ids of other ranks and padding in between."""
    torch.manual_seed(first)
    ids = torch.randint(-1, 7, (17, 3), dtype=dtype)
    want = sorted(
        (expert - first, position)
        for position, expert in enumerate(ids.flatten().tolist())
        if first <= expert < first + count
    )
    order = permute(ids, first_expert=first, num_experts=count)
    assert order.expert.tolist() == [expert for expert, _ in want]
    assert order.position.tolist() == [position for _, position in want]
    assert order.token.tolist() == [position // 3 for _, position in want]
    experts = [expert for expert, _ in want]
    assert order.counts == tuple((e, experts.count(e)) for e in range(count) if e in experts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_and_no_local_tokens_have_no_rows(dtype: torch.dtype) -> None:
    for ids in (torch.empty(0, 2, dtype=dtype), torch.full((3, 2), 9, dtype=dtype)):
        order = permute(ids, first_expert=0, num_experts=4)
        assert order.counts == ()
        assert order.position.numel() == order.token.numel() == order.expert.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_the_weighted_sum_of_its_rows(dtype: torch.dtype) -> None:
    """Against float64 on the rounded rows: one FP32 sum and one rounding apart."""
    torch.manual_seed(0)
    ids, weights = torch.randint(0, 5, (11, 4)), torch.rand(11, 4)
    order = permute(ids, first_expert=1, num_experts=3)
    rows = torch.randn(order.token.numel(), 8)
    want = torch.zeros(11, 8, dtype=torch.float64)
    for row, position in zip(rows.to(dtype).double(), order.position.tolist(), strict=True):
        want[position // 4] += row * weights.flatten()[position].double()
    result = finalize(rows, order, topk_weights=weights, dtype=dtype)
    assert result.dtype == dtype
    rtol = 2**-8 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(result.double(), want, rtol=rtol, atol=1e-6)


def test_slots_are_added_in_ascending_order() -> None:
    """1e8 + 1 - 1e8 is 0 in FP32 from left to right; any other order gives 1 or 0 elsewhere.

    Experts are visited in descending slot order, so adding as rows arrive would show.
    """
    ids = torch.tensor([[2, 1, 0], [0, 1, 2]])
    order = permute(ids, first_expert=0, num_experts=3)
    by_position = torch.tensor([1e8, 1.0, -1e8, 1e8, -1e8, 1.0])
    rows = by_position[order.position].unsqueeze(1)
    ones = torch.ones(2, 3)
    result = finalize(rows, order, topk_weights=ones, dtype=torch.float32)
    assert result.tolist() == [[0.0], [1.0]]


def test_each_row_is_rounded_before_it_is_weighted() -> None:
    """1 + 2**-9 is 1 in BF16; three of them weighed in FP32 would round up."""
    order = permute(torch.tensor([[0, 1, 2]]), first_expert=0, num_experts=3)
    rows = torch.full((3, 1), 1.0 + 2**-9)
    weights = torch.tensor([[1.0, 2.0, 1.0]])
    result = finalize(rows, order, topk_weights=weights, dtype=torch.bfloat16)
    assert result.item() == 4.0
    assert (rows.sum(0) + rows[0]).item() != 4.0


def test_a_token_without_rows_is_plus_zero() -> None:
    ids = torch.tensor([[7, 8], [0, 8]])
    order = permute(ids, first_expert=0, num_experts=4)
    result = finalize(-torch.ones(1, 3), order, topk_weights=torch.ones(2, 2), dtype=torch.bfloat16)
    assert result.tolist() == [[0.0] * 3, [-1.0] * 3]
    assert not result[0].signbit().any()
