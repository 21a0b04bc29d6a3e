# SPDX-License-Identifier: Apache-2.0
"""Chunking must not show in a result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tetrarch.numerics import chunks, nvfp4
from tetrarch.numerics.chunks import by_chunks


def test_rows_shared_numbers_and_missing_arguments_reach_the_right_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "_CPU_CHUNK", 12)
    seen: list[int] = []

    def function(rows: Tensor, each: Tensor, shared: Tensor, nothing: None) -> tuple[Tensor, ...]:
        seen.append(len(rows))
        assert nothing is None
        return rows * each + shared, each

    values = torch.arange(42.0).view(2, 7, 3)
    each = torch.arange(14.0).view(2, 7, 1)
    result, echoed = by_chunks(function, values, each, torch.tensor(0.5), None)
    assert seen == [4, 4, 4, 2]
    assert torch.equal(result, values * each + 0.5)
    assert torch.equal(echoed, each)


def test_a_scale_per_expert_is_spread_over_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CPU_CHUNK", 6)
    values, per_expert = torch.ones(2, 5, 3), torch.tensor([2.0, 3.0]).view(2, 1, 1)
    (result,) = by_chunks(lambda rows, scale: (rows * scale,), values, per_expert)
    assert torch.equal(result, values * per_expert)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_number_for_all_rows_may_have_any_dimensions(shape: tuple[int, ...]) -> None:
    """A stack of one expert has a scale of shape (1, 1, 1): as good as a bare number."""
    values, one = torch.randn(1, 5, 32), torch.full(shape, 0.5)
    codes, block_scale = nvfp4.encode(values, encode_scale=one)
    assert torch.equal(codes, nvfp4.encode(values[0], encode_scale=torch.tensor(0.5))[0][None])
    decoded = nvfp4.decode(codes, block_scale, global_scale=one)
    assert torch.equal(decoded, nvfp4.decode(codes, block_scale) * 0.5)


@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
def test_encoding_does_not_depend_on_the_chunk(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    values = torch.randn(17, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = (*nvfp4.encode_per_token(values), *nvfp4.encode_weight(values))
    monkeypatch.setattr(chunks, "_CPU_CHUNK", 64 * rows_at_once)
    parts = (*nvfp4.encode_per_token(values), *nvfp4.encode_weight(values))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.float(), other.float())
