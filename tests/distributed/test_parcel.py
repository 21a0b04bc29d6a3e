# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import torch

from tetrarch.distributed.parcel import Broadcast, Parcel, parcels

MIB = 1 << 20


def sizes(*broadcasts: int) -> list[list[int]]:
    made = parcels([Broadcast(size, b"") for size in broadcasts])
    return [[one.num_bytes for one in parcel.broadcasts] for parcel in made]


def test_large_tensors_travel_alone_and_small_ones_together() -> None:
    assert sizes() == []
    assert sizes(5, 0, 7) == [[5, 0, 7]]
    assert sizes(5, MIB, 7, 2 * MIB, MIB) == [[5], [MIB], [7], [2 * MIB], [MIB]]
    assert sizes(*[MIB // 2] * 5) == [[MIB // 2] * 2, [MIB // 2] * 2, [MIB // 2]]
    assert [len(parcel) for parcel in sizes(*[1] * 2500)] == [1024, 1024, 452]


def test_two_maps_share_their_bytes_which_lie_apart_and_aligned() -> None:
    parcel = Parcel([Broadcast(size, b"") for size in (3, 0, 70, 64)])
    assert parcel.num_bytes == 64 + 128 + 64
    memory = parcel.allocate()
    ours, theirs = parcel.map(memory), parcel.map(memory)
    os.close(memory)
    for index, tensor in enumerate(ours):
        tensor.fill_(index + 1)
    assert [len(tensor) for tensor in theirs] == [3, 0, 70, 64]
    for index, tensor in enumerate(theirs):
        assert torch.equal(tensor, torch.full_like(tensor, index + 1))
        assert tensor.data_ptr() % 64 == 0


def test_a_parcel_of_nothing_can_be_mapped() -> None:
    parcel = Parcel([Broadcast(0, b"")])
    memory = parcel.allocate()
    [tensor] = parcel.map(memory)
    os.close(memory)
    assert len(tensor) == 0
