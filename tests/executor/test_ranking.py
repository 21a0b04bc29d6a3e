# SPDX-License-Identifier: Apache-2.0
"""Ranking with ties."""

from __future__ import annotations

import pytest
import torch

from tetrarch.executor.ranking import best_ids


@pytest.mark.parametrize("count", [1, 3, 17, 40])
def test_equal_values_rank_by_ascending_id(count: int) -> None:
    """The oracle is Python's sort by (-value, id); 40 values of 5 kinds tie everywhere."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(-2, 3, (23, 40), generator=generator).float() * 0.5
    expected = [
        sorted(range(40), key=lambda i, row=row: (-row[i], i))[:count] for row in values.tolist()
    ]
    assert best_ids(values, count).tolist() == expected


def test_first_id_is_the_argmax() -> None:
    values = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert torch.equal(best_ids(values, 5)[:, 0], values.argmax(dim=-1))


def test_order_does_not_change_with_the_count() -> None:
    values = torch.randint(0, 9, (8, 200), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(best_ids(values, 200)[:, :7], best_ids(values, 7))


def test_zeros_of_either_sign_tie_and_minus_infinity_comes_last() -> None:
    values = torch.tensor([[-torch.inf, -0.0, 0.0, -1.0, 1.0, -torch.inf]])
    assert best_ids(values, 6).tolist() == [[4, 1, 2, 3, 0, 5]]
