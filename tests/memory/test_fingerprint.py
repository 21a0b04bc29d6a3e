# SPDX-License-Identifier: Apache-2.0
"""A fingerprint names what moved, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tetrarch.core.errors import AddressChanged
from tetrarch.memory.fingerprint import Fingerprints


def test_what_is_written_in_place_is_the_same() -> None:
    tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(2)}
    prints = Fingerprints.of(tensors)
    tensors["a"].fill_(1)
    prints.check(tensors)
    prints.check({**tensors, "c": torch.zeros(1)})  # nobody read it
    assert len(prints) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.clone(),
        lambda a: a.view(4, 3),
        lambda a: a.t(),
        lambda a: a.view(torch.int32),
    ],
    ids=["address", "shape", "strides", "dtype"],
)
def test_what_has_another_place_or_form_is_named(change: object) -> None:
    kept = torch.zeros(3, 4)
    prints = Fingerprints.of({"a": kept, "b": torch.zeros(2)})
    assert callable(change)
    b = torch.zeros(2)
    with pytest.raises(AddressChanged, match="read a, b, which moved"):
        prints.check({"a": change(kept), "b": b})


def test_what_is_gone_is_named() -> None:
    kept = {"a": torch.zeros(1)}
    prints = Fingerprints.of(kept | {"b": torch.zeros(2)})
    with pytest.raises(AddressChanged, match="read b, which moved"):
        prints.check(kept)
