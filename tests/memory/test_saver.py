# SPDX-License-Identifier: Apache-2.0
"""How torch_memory_saver is called; a fake stands for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tetrarch.core.errors import ConfigError
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.saver import FixedArena, SaverArena, load_saver
from tetrarch.memory.slots import SlotTable

SPEC = TensorSpec((10,), torch.uint8, torch.device("cpu"))


class FakeSaver:
    """Notes what is asked of it; like the real one, it cannot pause twice."""

    def __init__(self) -> None:
        self.hook_mode = "preload"
        self.calls: list[tuple[Any, ...]] = []
        self._paused: set[str] = set()

    @contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        self.calls.append(("enter", tag, enable_cpu_backup))
        yield
        self.calls.append(("leave", tag))

    def pause(self, tag: str) -> None:
        assert tag not in self._paused
        self._paused.add(tag)
        self.calls.append(("pause", tag))

    def resume(self, tag: str) -> None:
        self._paused.remove(tag)
        self.calls.append(("resume", tag))


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSaver]:
    fake = FakeSaver()
    module = SimpleNamespace(torch_memory_saver=fake)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.calls.append(("synchronize",)))
    load_saver.cache_clear()
    yield fake
    load_saver.cache_clear()


def test_a_gpu_arena_allocates_in_its_region_and_waits_before_it_pauses(saver: FakeSaver) -> None:
    arena = SaverArena(load_saver(), tag="weights", backup=True)
    assert saver.hook_mode == "torch"
    SlotTable(arena).allocate("w", SPEC)
    arena.keep()
    assert arena.release() == 10
    arena.resume()
    assert saver.calls == [
        ("enter", "weights", True), ("leave", "weights"),
        ("synchronize",), ("pause", "weights"), ("resume", "weights"),
    ]  # fmt: skip


def test_a_gpu_arena_cannot_keep_what_was_allocated_without_a_backup(saver: FakeSaver) -> None:
    arena = SaverArena(load_saver(), tag="weights", backup=False)
    with pytest.raises(ConfigError, match="--enable-weights-cpu-backup"):
        arena.keep()
    assert not arena.is_released
    arena.release()


def test_the_mode_is_set_once_because_the_saver_takes_it_only_before_its_first_use(
    saver: FakeSaver,
) -> None:
    SaverArena(load_saver(), tag="weights", backup=False)
    saver.hook_mode = "used"
    SaverArena(load_saver(), tag="kv_cache", backup=False)
    assert saver.hook_mode == "used"


def test_without_the_saver_a_gpu_names_the_flag_and_the_extra() -> None:
    arena = FixedArena()
    slot = arena.empty(SPEC).fill_(3)
    for refused in (arena.release, arena.keep):
        with pytest.raises(ConfigError, match=r"(?s)--enable-memory-saver.*\[memory-saver\]"):
            refused()
    assert not arena.is_released
    assert slot.tolist() == [3] * 10


def test_a_flag_without_the_package_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)  # type: ignore[arg-type]
    load_saver.cache_clear()
    with pytest.raises(ConfigError, match=r"\[memory-saver\]"):
        SaverArena(load_saver(), tag="weights", backup=False)
