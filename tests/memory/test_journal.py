# SPDX-License-Identifier: Apache-2.0
"""What a journal wrote, it can take back, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tetrarch.core.errors import AddressChanged
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.journal import Journal
from tetrarch.memory.slots import SlotTable

CPU = torch.device("cpu")


def make_table(*names: str) -> SlotTable:
    table = SlotTable()
    for value, name in enumerate(names):
        table.allocate(name, TensorSpec((4,), torch.float32, CPU)).fill_(value)
    return table


def test_undo_brings_every_slot_back_and_keeps_its_address() -> None:
    one, two = make_table("a", "b"), make_table("a")
    addresses = one.addresses() | {"two": two["a"].data_ptr()}
    one["b"][0] = float("nan")  # its bits come back too
    before = one["b"].view(torch.int32).clone()
    journal = Journal(keeps=True)
    journal.write(one, "a", torch.full((4,), 7.0))
    journal.write(one, "b", torch.full((4,), 8.0))
    journal.write(two, "a", torch.full((4,), 9.0))  # the same name in another table
    assert [one["a"][0], one["b"][0], two["a"][0]] == [7.0, 8.0, 9.0]
    journal.undo()
    assert [one["a"][0], two["a"][0]] == [0.0, 0.0]
    assert torch.equal(one["b"].view(torch.int32), before)
    assert one.addresses() | {"two": two["a"].data_ptr()} == addresses
    assert journal.is_empty


def test_a_slot_written_twice_comes_back_as_it_was_before_the_first_write() -> None:
    table, journal = make_table("a"), Journal(keeps=True)
    for value in (5.0, 6.0):
        journal.write(table, "a", torch.full((4,), value))
    assert journal.num_kept_bytes == 16
    journal.undo()
    assert table["a"].tolist() == [0.0] * 4


def test_a_refused_write_changes_nothing() -> None:
    table, journal = make_table("a"), Journal(keeps=True)
    with pytest.raises(AddressChanged, match="shape"):
        journal.write(table, "a", torch.zeros(5))
    journal.undo()
    assert table["a"].tolist() == [0.0] * 4


def test_without_copies_there_is_no_undo_unless_there_is_nothing_to_undo() -> None:
    table, journal = make_table("a"), Journal(keeps=False)
    journal.undo()
    journal.write(table, "a", torch.ones(4))
    assert journal.num_kept_bytes == 0
    with pytest.raises(RuntimeError, match="keeps nothing"):
        journal.undo()
    assert table["a"].tolist() == [1.0] * 4


def test_without_host_memory_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    table, journal = make_table("a", "b"), Journal(keeps=True)
    journal.write(table, "a", torch.ones(4))

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        with pytest.raises(MemoryError, match="16 bytes"):
            journal.write(table, "b", torch.full((4,), 9.0))
    assert table["b"].tolist() == [1.0] * 4
    journal.undo()
    assert table["a"].tolist() == [0.0] * 4


def test_an_undo_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table, journal = make_table("a", "b"), Journal(keeps=True)
    for name in ("a", "b"):
        journal.write(table, name, torch.full((4,), 7.0))
    with monkeypatch.context() as patch:
        patch.setattr(table, "write_", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            journal.undo()
    journal.undo()
    assert [table["a"][0], table["b"][0]] == [0.0, 1.0]


def test_rows_written_one_by_one_come_back_together() -> None:
    table = make_table("a")
    journal = Journal(keeps=True)
    for row in (2, 0):
        journal.write(table, "a", torch.full((1,), 9.0), slice(row, row + 1))
    assert table["a"].tolist() == [9.0, 0.0, 9.0, 0.0]
    journal.undo()
    assert table["a"].tolist() == [0.0] * 4
