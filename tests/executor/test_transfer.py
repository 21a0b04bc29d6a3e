# SPDX-License-Identifier: Apache-2.0
"""What crosses between host and device arrives whole, and on a GPU nobody waits for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tetrarch.executor.transfer import Download, upload

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ARRAYS = [
    np.arange(7, dtype=np.int64),
    np.zeros(0, np.int32),
    np.array([[1.5], [-2.0], [np.inf]], np.float32),
    np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2],  # not contiguous
    np.zeros((0, 3), np.float32),
    np.array([True, False]),
]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_as_they_were_and_aligned(device: str) -> None:
    tensors = upload(torch.device(device), *ARRAYS)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert tensor.device.type == device
        assert tensor.data_ptr() % 16 == 0
        assert tensor.is_contiguous()
        back = tensor.cpu().numpy()
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert np.array_equal(back, array)


@pytest.mark.gpu
def test_one_storage_holds_them_all() -> None:
    """So that one transfer brings them."""
    tensors = upload(torch.device("cuda"), *ARRAYS)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_arrays_may_change_as_soon_as_they_are_sent() -> None:
    array = np.arange(5)
    (tensor,) = upload(torch.device("cpu"), array)
    array[:] = 0
    assert tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_back(device: str) -> None:
    tensors = [torch.arange(3, device=device), torch.ones(0, 4, device=device)]
    back = Download(tensors).wait()
    assert all(tensor.is_cpu for tensor in back)
    assert [tensor.tolist() for tensor in back] == [[0, 1, 2], []]


@pytest.mark.gpu
def test_the_host_goes_on_while_the_device_works() -> None:
    """Both ways: a copy is queued behind work of 0.1 s, and the host is back at once."""
    cuda = torch.device("cuda")
    upload(cuda, *ARRAYS)  # the first pinned memory takes long
    Download(upload(cuda, *ARRAYS)).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles
    busy = torch.cuda.Event()
    busy.record()
    download = Download(upload(cuda, *ARRAYS))
    assert not busy.query(), "the host has waited"
    assert download.wait()[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert busy.query()
