# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tetrarch.core.errors import RequestError
from tetrarch.distributed.broadcast import cut, pieces, seal


def test_pieces_know_their_bytes() -> None:
    one, none, scalar = pieces(
        ["a", "b", "c"], ["bfloat16", "float32", "torch.uint8"], [[2, 3], [0, 5], []]
    )
    assert (one.num_bytes, none.num_bytes, scalar.num_bytes) == (12, 0, 1)


def test_a_bucket_is_cut_end_to_end_aligned_or_not() -> None:
    expected = pieces(["a", "b", "c"], ["uint8", "float32", "float8_e4m3fn"], [[3], [2], [2, 1]])
    tensors = [
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        torch.tensor([1.5, -2.0]),
        torch.tensor([[1.0], [0.5]]).to(torch.float8_e4m3fn),
    ]
    buffer = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    got = cut(expected, [buffer])
    assert list(got) == ["a", "b", "c"]
    for tensor, other in zip(tensors, got.values(), strict=True):
        assert other.dtype == tensor.dtype
        assert torch.equal(other.float(), tensor.float())


def test_no_number_ends_in_the_seal_of_its_dtype() -> None:
    """It is a NaN, and not the one that arithmetic gives."""
    floats = ("float64", "float32", "float16", "bfloat16")
    for name in (*floats, "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        dtype = getattr(torch, name)
        [piece, none] = pieces(["a", "b"], [name] * 2, [[3], [0]])
        assert len(seal(piece)) == dtype.itemsize
        assert torch.frombuffer(bytearray(seal(piece)), dtype=dtype).float().isnan().all()
        usual = torch.tensor([0.0]) / 0
        assert name not in floats or bytes(usual.to(dtype).view(torch.uint8)) != seal(piece)
        assert seal(none) == b""


def test_what_has_no_nan_is_sealed_at_random_where_it_is_long_enough() -> None:
    for name in ("int64", "uint8", "bool", "float4_e2m1fn_x2"):
        [long, short] = pieces(["a", "b"], [name] * 2, [[8], [0]])
        assert len(seal(long)) == 8
        assert seal(long) != seal(long)
        assert seal(short) == b""
    assert seal(pieces(["a"], ["uint8"], [[7]])[0]) == b""


def test_one_tensor_is_its_buffer() -> None:
    (got,) = cut(pieces(["a"], ["float16"], [[2]]), [torch.zeros(4, dtype=torch.uint8)]).values()
    assert torch.equal(got, torch.zeros(2, dtype=torch.float16))


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "param"),
    [
        ([], [], [], "names"),
        (["a"], [], [[1]], "names"),
        (["a", "b"], ["uint8"], [[1], [1]], "names"),
        (["a", "a"], ["uint8"] * 2, [[1], [1]], "names"),
        (["a"], ["load"], [[1]], "dtypes"),
        (["a"], ["complex64"], [[1]], "dtypes"),
        (["a"], [""], [[1]], "dtypes"),
        (["a"], ["uint8"], [[-1]], "shapes"),
        (["a"], ["uint8"], [[True]], "shapes"),
        (["a"], ["uint8"], [[2**61]], "shapes"),
        (["a"], ["uint8"], [[2**40, 0, 2**40]], "shapes"),
        (["a"], ["uint8"], [[1] * 65], "shapes"),
    ],
)
def test_what_is_no_announcement_is_refused(
    names: list[str], dtypes: list[str], shapes: Sequence[list[int]], param: str
) -> None:
    with pytest.raises(RequestError) as error:
        pieces(names, dtypes, shapes)
    assert error.value.param == param
