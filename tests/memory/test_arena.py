# SPDX-License-Identifier: Apache-2.0
"""Released memory is really gone, and comes back at the same addresses."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tetrarch.core.errors import MemoryRefused
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena, HostArena
from tetrarch.memory.slots import SlotTable

CPU, MIB = torch.device("cpu"), 1 << 20
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]
# A mapping of whole pages, one that ends within a page, two small ones, a number, nothing.
SHAPES = [(1 << 20,), (3, 350_001), (5, 7), (1,), (), (0, 4)]


def spec(*shape: int, dtype: torch.dtype = torch.uint8) -> TensorSpec:
    return TensorSpec(shape, dtype, CPU)


def filled(arena: Arena) -> SlotTable:
    """A table of every dtype and shape, full of bytes that are 0 or 1 (a bool knows no others)."""
    table = SlotTable(arena)
    generator = torch.Generator().manual_seed(0)
    for i, dtype in enumerate(DTYPES):
        for j, shape in enumerate(SHAPES):
            raw = bytes_of(table.allocate(f"{i}.{j}", spec(*shape, dtype=dtype)))
            raw.random_(0, 2, generator=generator)
    return table


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def contents(table: SlotTable) -> dict[str, torch.Tensor]:
    return {name: bytes_of(tensor).clone() for name, tensor in table.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_of_an_arena_is_an_ordinary_one(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    arena = HostArena()
    arena.empty(spec(3))  # the next small one does not begin its chunk
    tensor = arena.empty(spec(*shape, dtype=dtype))
    assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, CPU)
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert tensor.data_ptr() % 64 == 0


def test_addresses_survive_a_release_and_contents_become_zero() -> None:
    arena = HostArena()
    table = filled(arena)
    before = table.addresses()
    assert arena.num_bytes == table.num_bytes
    assert arena.release() == table.num_bytes
    assert arena.is_released
    arena.resume()
    assert not arena.is_released
    assert table.addresses() == before
    assert not any(raw.any() for raw in contents(table).values())
    table.write_("1.0", torch.ones(1 << 20))
    assert table["1.0"].all()


def test_what_was_kept_comes_back_bit_for_bit() -> None:
    arena = HostArena()
    table = filled(arena)
    for _ in range(2):
        before = contents(table)
        arena.keep()
        arena.release()
        assert not any(raw.any() for raw in contents(table).values())
        arena.resume()
        assert same(contents(table), before)
        table["0.0"].add_(1)  # the second time round it is the new contents that return
    arena.release()
    arena.resume()
    assert not any(raw.any() for raw in contents(table).values()), "kept contents return once"


def test_only_the_last_of_two_copies_is_kept() -> None:
    arena = HostArena()
    slot = arena.empty(spec(8)).fill_(1)
    arena.keep()
    slot.fill_(2)
    arena.keep()
    arena.release()
    arena.resume()
    assert slot.tolist() == [2] * 8


@contextmanager
def spooled_to(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[None]:
    with monkeypatch.context() as patch:
        opened: Any = lambda buffering, dir: path.open("w+b", buffering=buffering)  # noqa: E731
        patch.setattr(tempfile, "TemporaryFile", opened)
        yield


def test_a_full_disk_is_an_error_before_anything_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = HostArena()
    table = filled(arena)
    before = contents(table)
    with (
        spooled_to(monkeypatch, Path("/dev/full")),
        pytest.raises(MemoryRefused, match=r"(?s)cannot keep .* No space left .* TMPDIR"),
    ):
        arena.keep()
    assert not arena.is_released
    assert same(contents(table), before)
    arena.keep()  # on a disk with room
    arena.release()
    arena.resume()
    assert same(contents(table), before)


def test_a_copy_that_cannot_be_read_leaves_the_arena_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arena, path = HostArena(), tmp_path / "spool"
    table = filled(arena)
    before = contents(table)
    with spooled_to(monkeypatch, path):
        arena.keep()
    arena.release()
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(whole) // 2)
    with pytest.raises(MemoryRefused, match="ends too early"):
        arena.resume()
    assert arena.is_released
    assert not any(raw.any() for raw in contents(table).values()), "half a copy takes no memory"
    with path.open("r+b") as file:
        file.write(whole)
    arena.resume()
    assert same(contents(table), before)


def test_small_tensors_share_a_mapping_and_large_ones_do_not() -> None:
    arena = HostArena()
    starts = [arena.empty(spec(100)).data_ptr() for _ in range(1000)]
    assert [b - a for a, b in pairwise(starts)] == [128] * 999
    assert len(arena._mappings) == 1
    arena.empty(spec(MIB))
    arena.empty(spec(MIB - 1))  # does not fit behind the thousand
    assert [len(mapping) for mapping in arena._mappings] == [MIB] * 3
    arena.empty(spec(0))
    assert arena.num_bytes == 100_000 + 2 * MIB - 1


def test_a_tensor_keeps_its_own_mapping_and_no_other() -> None:
    arena = HostArena()
    table = SlotTable(arena)
    slot = table.allocate("kept", spec(2 * MIB))
    table.allocate("gone", spec(2 * MIB))
    kept, gone = map(weakref.ref, arena._mappings)
    del arena, table
    gc.collect()
    assert gone() is None
    assert kept() is not None
    slot.fill_(3)
    del slot
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("exponent", [50, 62, 70])
def test_more_than_the_machine_has_is_refused(exponent: int) -> None:
    arena = HostArena()
    with pytest.raises(MemoryRefused, match="cannot allocate"):
        arena._map(1 << exponent)
    if exponent < 63:
        with pytest.raises(MemoryRefused, match="cannot allocate"):
            SlotTable(arena).allocate("w", spec(1 << exponent))
    assert arena.num_bytes == 0


def test_states_are_never_guessed() -> None:
    arena = HostArena()
    with pytest.raises(ValueError, match="not released"):
        arena.resume()
    arena.release()
    with pytest.raises(ValueError, match="already"):
        arena.release()
    with pytest.raises(ValueError, match="released arena"):
        arena.empty(spec(1))
    with pytest.raises(ValueError, match="meta"):
        HostArena().empty(TensorSpec((1,), torch.uint8, torch.device("meta")))


def test_slots_made_under_inference_mode_can_be_written_in_and_outside_of_it() -> None:
    table = SlotTable(HostArena())
    with torch.inference_mode():
        slot = table.allocate("w", spec(4))
        slot[torch.tensor([1])] = 5
    table.write_("w", torch.ones(4, dtype=torch.uint8))
    assert not slot.is_inference()
    assert slot.tolist() == [1] * 4


CHILD = """
import json, os, sys
import torch
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import HostArena
from tetrarch.memory.slots import SlotTable

statm = os.open("/proc/self/statm", os.O_RDONLY)
def resident():
    return int(os.pread(statm, 100, 0).split()[1]) * os.sysconf("SC_PAGESIZE")

arena = HostArena()
table = SlotTable(arena)
for i in range(20):
    table.allocate(str(i), TensorSpec((10_000_000,), torch.uint8, torch.device("cpu")))
for i in range(500):
    table.allocate(f"small {i}", TensorSpec((1000,), torch.float32, torch.device("cpu")))
start = resident()
for slot in table.values():
    slot.fill_(7)
full = resident()
if sys.argv[1] == "keep":
    arena.keep()
arena.release()
released = resident()
arena.resume()
values = {value for slot in table.values() for value in (slot[0].item(), slot[-1].item())}
for slot in table.values():
    slot.fill_(1)
print(json.dumps(dict(
    size=table.num_bytes, values=sorted(values),
    taken=full - start, given=full - released, again=resident() - released)))
"""


@pytest.mark.parametrize("how", ["lose", "keep"])
def test_a_release_gives_200_mb_back_to_the_system(how: str) -> None:
    child = subprocess.run([sys.executable, "-c", CHILD, how], stdout=subprocess.PIPE, check=True)
    found = json.loads(child.stdout)
    for moved in ("taken", "given", "again"):
        assert found[moved] >= 0.95 * found["size"], (moved, found[moved])
    assert found["values"] == [7 if how == "keep" else 0]
