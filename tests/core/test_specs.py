# SPDX-License-Identifier: Apache-2.0
"""A spec knows its bytes and says in words how a tensor differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from tetrarch.core.specs import TensorSpec

SPEC = TensorSpec((3, 4), torch.bfloat16, torch.device("cpu"))


def test_a_spec_counts_bytes_as_torch_does() -> None:
    assert SPEC.num_bytes == SPEC.empty().nbytes == 24


def test_a_tensor_made_from_a_spec_matches_it() -> None:
    assert SPEC.mismatch(SPEC.empty()) is None


def test_a_mismatch_is_named() -> None:
    assert "shape is (4, 3)" in (SPEC.mismatch(SPEC.empty().T) or "")
    assert "dtype is torch.float32" in (SPEC.mismatch(SPEC.empty().float()) or "")
    assert "device is meta" in (SPEC.mismatch(SPEC.empty().to("meta")) or "")


def test_a_device_without_an_index_is_any_of_its_kind() -> None:
    """An allocation on `cuda` says that it is on `cuda:0`."""
    first = SimpleNamespace(shape=(2,), dtype=torch.int32, device=torch.device("cuda", 0))
    value = cast(Tensor, first)
    for name, how in (
        ("cuda", None),
        ("cuda:0", None),
        ("cuda:1", "device is cuda:0, expected cuda:1"),
        ("cpu", "device is cuda:0, expected cpu"),
    ):
        assert TensorSpec((2,), torch.int32, torch.device(name)).mismatch(value) == how
