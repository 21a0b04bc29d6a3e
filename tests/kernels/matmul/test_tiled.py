# SPDX-License-Identifier: Apache-2.0
"""A row's product has the same bits at any number of rows, wherever it stands among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tetrarch.kernels.matmul.tiled import ROWS, tiled_bmm, tiled_mm

COUNTS = (1, 2, 3, 4, 7, 33)
MANY = 70
# The demo model's: attention, experts, router, head. Then odd ones, and a shared expert's gate.
SHAPES = [
    *((256, 256), (256, 128), (128, 256), (256, 8), (256, 1024)),
    *((48, 80), (80, 48), (272, 1000), (1000, 272), (48, 6), (18, 33), (32, 1)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Product = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def cancelling(width: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows and a weight whose products are 0: what is left is rounding, all bits of it.

    Every term comes once with either sign, shuffled along K. The order of a sum decides what
    remains, and no last rounding hides it.
    """
    generator = torch.Generator().manual_seed(width * 10_000 + out)
    half = width // 2
    shuffle = torch.randperm(2 * half, generator=generator)
    rows = torch.randn(MANY, half, generator=generator)
    weight = torch.randn(half, out, generator=generator)
    rows = torch.cat((rows, -rows), 1)[:, shuffle]
    weight = torch.cat((weight, weight))[shuffle]
    return rows.to(dtype).contiguous(), weight.to(dtype).contiguous()


def differing(product: Product, rows: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """Return (count, first row) of the slices whose product is not the slice of the product."""
    whole = product(rows, weight)
    places = [(count, at) for count in COUNTS for at in range(0, MANY - count + 1, 5)]
    return [
        (count, at)
        for count, at in places
        if not torch.equal(product(rows[at : at + count], weight), whole[at : at + count])
    ]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rows, weight = cancelling(*shape, dtype)
    assert differing(tiled_mm, rows, weight) == []
    assert differing(tiled_mm, rows, weight.mT.contiguous().mT) == [], "stored as (out, in)"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_ordinary_product_fails_that_test(dtype: torch.dtype) -> None:
    assert any(differing(torch.mm, *cancelling(*shape, dtype)) for shape in SHAPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_see_what_else_is_in_its_tile(dtype: torch.dtype) -> None:
    rows, weight = cancelling(256, 128, dtype)
    others = torch.full_like(rows, torch.nan)
    for place in range(ROWS[dtype]):
        among = others.clone()
        among[place] = rows[0]
        assert torch.equal(tiled_mm(among, weight)[place], tiled_mm(rows[:1], weight)[0])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_is_right(dtype: torch.dtype, count: int) -> None:
    rows, weight, bias = torch.randn(count, 48), torch.randn(48, 80), torch.randn(80)
    rows, weight, bias = rows.to(dtype), weight.to(dtype), bias.to(dtype)
    want = rows.double() @ weight.double()
    close = (
        {"rtol": 2**-7, "atol": 2**-4} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-4}
    )
    torch.testing.assert_close(tiled_mm(rows, weight).double(), want, **close)
    got = tiled_mm(rows, weight, bias=bias)
    torch.testing.assert_close(got.double(), want + bias.double(), **close)
    out = torch.full((count, 80), torch.nan, dtype=dtype)
    assert tiled_mm(rows, weight, out=out) is out
    assert torch.equal(out, tiled_mm(rows, weight))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (128, 512), (24, 18)], ids=str)
def test_a_batch_of_weights_treats_rows_alike(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, weight = cancelling(*shape, dtype)
    heads = torch.stack((rows, rows.flip(0), -rows, rows.roll(7, 0)))
    weights = torch.stack((weight, -weight, weight.flip(1), weight))

    def product(one: Tensor, _: Tensor) -> Tensor:
        return tiled_bmm(one.transpose(0, 1), weights).transpose(0, 1)

    assert differing(product, heads.transpose(0, 1), weight) == []
    want = (heads.double() @ weights.double()).to(dtype)
    torch.testing.assert_close(tiled_bmm(heads, weights), want, rtol=0.1, atol=0.1)
