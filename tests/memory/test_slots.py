# SPDX-License-Identifier: Apache-2.0
"""A slot is written in place or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tetrarch.core.errors import AddressChanged
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena, HostArena
from tetrarch.memory.slots import SlotTable

SPEC = TensorSpec((2, 3), torch.float32, torch.device("cpu"))


def test_a_write_changes_the_values_and_keeps_the_address() -> None:
    table = SlotTable()
    slot = table.allocate("w", SPEC)
    before = table.addresses()
    for value in (1.0, 2.0, 3.0):
        table.write_("w", torch.full((2, 3), value))
        assert slot.tolist() == [[value] * 3] * 2
    assert table.addresses() == before == {"w": slot.data_ptr()}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (torch.ones(3, 2), "shape"),
        (torch.ones(2, 3, dtype=torch.float64), "dtype"),
        (torch.ones(2, 3, device="meta"), "device"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_written(
    value: torch.Tensor, word: str
) -> None:
    table = SlotTable()
    table.allocate("w", SPEC).fill_(7.0)
    with pytest.raises(AddressChanged, match=word):
        table.write_("w", value)
    assert (table["w"] == 7.0).all()


def test_a_device_without_an_index_is_the_one_that_its_tensors_name() -> None:
    """As `cuda` and `cuda:0`; a CPU tensor forgets its index where a CUDA tensor gains one."""
    named = torch.device("cpu", 0)
    assert named != torch.empty(0, device=named).device
    table = SlotTable()
    table.allocate("w", TensorSpec((2, 3), torch.float32, named))
    table.write_("w", torch.ones(2, 3, device=named))
    assert table["w"].all()


def test_names_are_taken_once_and_none_after_freezing() -> None:
    table = SlotTable()
    table.allocate("w", SPEC)
    with pytest.raises(AddressChanged, match="taken"):
        table.allocate("w", SPEC)
    table.freeze()
    with pytest.raises(AddressChanged, match="frozen"):
        table.allocate("v", SPEC)
    table.write_("w", torch.zeros(2, 3))  # writing goes on
    assert list(table) == ["w"]


def test_the_table_counts_its_bytes() -> None:
    table = SlotTable()
    table.allocate("w", SPEC)
    table.allocate("codes", TensorSpec((5,), torch.uint8, torch.device("cpu")))
    assert table.num_bytes == 24 + 5
    assert len(table) == 2


def test_slots_made_under_inference_mode_can_be_written_outside_of_it() -> None:
    table = SlotTable()
    with torch.inference_mode():
        table.allocate("w", SPEC)
    table.write_("w", torch.ones(2, 3))
    assert not table["w"].is_inference()


def test_rows_are_written_alone() -> None:
    table = SlotTable()
    slot = table.allocate("w", SPEC).fill_(7.0)
    table.write_("w", torch.ones(1, 3), slice(1, 2))
    assert slot.tolist() == [[7.0] * 3, [1.0] * 3]
    with pytest.raises(AddressChanged, match="shape"):
        table.write_("w", torch.ones(2, 3), slice(1, 2))


@pytest.mark.parametrize("arena", [None, HostArena()])
def test_rows_of_one_tensor_are_slots_of_their_own(arena: Arena | None) -> None:
    table = SlotTable(arena)
    sizes = {"q": 4, "k": 2, "v": 3}
    table.allocate_rows({name: replace(SPEC, shape=(n, 3)) for name, n in sizes.items()})
    assert {name: tuple(slot.shape) for name, slot in table.items()} == {
        name: (n, 3) for name, n in sizes.items()
    }
    for value, name in enumerate(sizes):
        table.write_(name, torch.full((sizes[name], 3), float(value)))
    assert table["q"].as_strided((9, 3), (3, 1))[:, 0].tolist() == [0.0] * 4 + [1.0] * 2 + [2.0] * 3
    assert table.num_bytes == 9 * 3 * 4
    with pytest.raises(AddressChanged, match="'k'"):
        table.allocate_rows({"new": SPEC, "k": SPEC})
    assert "new" not in table, "nothing is allocated where one is refused"
