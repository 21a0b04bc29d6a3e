# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tetrarch.core.errors import RequestError
from tetrarch.models.borrowed import SavedBytes, Storage, View, count, owned, sizes, view

F32 = torch.float32
BYTES = bytes(torch.arange(8.0).view(torch.uint8).tolist())


class Counted:
    """Memory that says what was copied from it."""

    num_bytes = 32

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []

    def copied(self, low: int, high: int) -> Tensor:
        self.copies.append((low, high))
        return SavedBytes(BYTES).copied(low, high)


def look(offset: object, size: object, stride: object) -> View:
    return view(Storage(SavedBytes(BYTES)), F32, offset, (size, stride))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (1, (8,), (1,)),
        (0, (9,), (1,)),
        (0, (2, 4), (5, 1)),
        (2**61, (1,), (1,)),
        (0, (2**40, 2**40), (0, 0)),
        (0, (2**61, 0, 2**61), (0, 0, 0)),
        (0, (10**9,), (0,)),  # 4 GB shown of 4 bytes
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (2,), (-1,)),
        (0, (2,), (1, 1)),
        (0, (True,), (1,)),
        (0, (1,) * 65, (1,) * 65),
        (0, [8], (1,)),
        ("0", (8,), (1,)),
    ],
)
def test_a_view_beyond_its_storage_is_refused(offset: object, size: object, stride: object) -> None:
    with pytest.raises(RequestError):
        look(offset, size, stride)


def test_a_view_to_the_end_of_its_storage_is_taken() -> None:
    (got,) = owned([look(1, (2, 3), (4, 1))])
    assert got.tolist() == [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]
    assert look(1, (2, 3), (4, 1)).span == (4, 32)


def test_a_view_needs_a_storage_and_a_dtype() -> None:
    for storage, dtype in ((BYTES, F32), (Storage(SavedBytes(BYTES)), None)):
        with pytest.raises(RequestError, match="no storage"):
            view(storage, dtype, 0, ((1,), (1,)))


def test_a_storage_is_copied_once_and_no_further_than_it_is_seen() -> None:
    memory, other = Counted(), Counted()
    first = view(Storage(memory), F32, 5, ((2,), (1,)))
    second = view(Storage(memory), torch.uint8, 17, ((3,), (1,)))
    nothing = view(Storage(other), F32, 8, ((0, 4), (4, 1)))
    got = owned([first, nothing, second, first])
    assert memory.copies == [(16, 28)]  # from a multiple of 16, for any dtype's sake
    assert other.copies == [(0, 0)]  # its sender waits for it as for any other
    assert got[0].tolist() == [5.0, 6.0]
    assert got[1].shape == (0, 4)
    assert got[2].tolist() == list(BYTES[17:20])
    assert got[3].data_ptr() == got[0].data_ptr()


def test_a_copy_may_be_written() -> None:
    (got,) = owned([look(0, (8,), (1,))])
    got.fill_(1)
    assert got.sum() == 8


class Full(Counted):
    def copied(self, low: int, high: int) -> Tensor:
        raise RuntimeError("out of memory")


def test_no_room_for_a_copy_is_the_requests_error() -> None:
    with pytest.raises(RequestError, match="no room"):
        owned([view(Storage(Full()), F32, 0, ((1,), (1,)))])


@pytest.mark.parametrize("value", [-1, 2**62, True, 1.0, "1", None])
def test_a_count_is_an_integer_that_torch_can_add(value: object) -> None:
    with pytest.raises(RequestError):
        count(value)
    with pytest.raises(RequestError):
        sizes((1, value))
    assert sizes((0, 2**62 - 1)) == (0, 2**62 - 1)
