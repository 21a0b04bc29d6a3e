# SPDX-License-Identifier: Apache-2.0
"""Regions come and go in any order, and say what they did."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from tetrarch.config.plan import Plan
from tetrarch.core.errors import ConfigError, MemoryRefused
from tetrarch.core.specs import TensorSpec
from tetrarch.executor import regions as room
from tetrarch.executor.regions import RegionChange, Regions, RegionState
from tetrarch.memory.arena import Arena
from tetrarch.memory.slots import Region, SlotTable

MakePlan = Callable[..., Plan]
CPU = torch.device("cpu")
WEIGHTS, KV, GRAPHS = Region.WEIGHTS, Region.KV_CACHE, Region.GRAPHS
SIZES = {WEIGHTS: 3 << 20, KV: 2 << 20, GRAPHS: 0}
RESIDENT, RELEASED = RegionState.RESIDENT, RegionState.RELEASED


@pytest.fixture
def regions(make_plan: MakePlan) -> Regions:
    return Regions(make_plan().memory, CPU)


@pytest.fixture
def slots(regions: Regions) -> dict[Region, torch.Tensor]:
    return {
        region: SlotTable(regions[region])
        .allocate("w", TensorSpec((size,), torch.uint8, CPU))
        .fill_(9)
        for region, size in SIZES.items()
        if size
    }


def test_both_calls_say_what_they_moved_and_what_was_so_before(
    regions: Regions, slots: dict[Region, torch.Tensor]
) -> None:
    everything = {WEIGHTS: 3 << 20, KV: 2 << 20, GRAPHS: 0}
    assert regions.release([KV], backup=False) == RegionChange({KV: 2 << 20}, ())
    assert regions.states == {WEIGHTS: RESIDENT, KV: RELEASED, GRAPHS: RESIDENT}
    assert regions.release(list(Region), backup=False) == RegionChange(
        everything | {KV: 0}, already=(KV,)
    )
    assert set(regions.states.values()) == {RELEASED}
    nothing = RegionChange(dict.fromkeys(everything, 0), already=tuple(Region))
    assert regions.release(list(Region), backup=True) == nothing
    assert regions.resume([WEIGHTS]) == RegionChange({WEIGHTS: 3 << 20}, ())
    assert regions.resume(set(Region)) == RegionChange(everything | {WEIGHTS: 0}, (WEIGHTS,))
    assert regions.resume(list(Region)) == nothing
    assert regions.resume([]) == RegionChange({}, ())


@pytest.mark.parametrize("backup", [False, True])
def test_only_weights_are_kept_and_only_if_asked(
    regions: Regions, slots: dict[Region, torch.Tensor], backup: bool
) -> None:
    regions.release(list(Region), backup=backup)
    regions.resume(list(Region))
    assert slots[WEIGHTS].unique().tolist() == [9 if backup else 0]
    assert not slots[KV].any()


def test_any_sequence_of_calls_ends_in_the_state_that_was_last_asked_for(
    regions: Regions, slots: dict[Region, torch.Tensor]
) -> None:
    addresses = {region: slot.data_ptr() for region, slot in slots.items()}
    model = dict.fromkeys(Region, RESIDENT)
    draw = random.Random(3)
    for _ in range(300):
        tags = draw.sample(list(Region), draw.randint(0, 3))
        wanted = draw.choice(list(RegionState))
        already = {tag for tag in tags if model[tag] is wanted}
        if wanted is RELEASED:
            change = regions.release(tags, backup=draw.random() < 0.1)
        else:
            change = regions.resume(tags)
        model |= dict.fromkeys(tags, wanted)
        assert regions.states == model
        assert set(change.already) == already
        assert change.num_bytes == {tag: 0 if tag in already else SIZES[tag] for tag in tags}
    assert {region: slot.data_ptr() for region, slot in slots.items()} == addresses


def test_the_order_does_not_depend_on_how_the_tags_were_named(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {id(regions[region]): region for region in Region}
    seen: list[Region] = []
    for method in ("release", "resume"):
        theirs = getattr(Arena, method)

        def noted(arena: Arena, theirs: Callable[[Arena], int] = theirs) -> int:
            seen.append(names[id(arena)])
            return theirs(arena)

        monkeypatch.setattr(Arena, method, noted)
    for tags in itertools.permutations(Region):
        seen.clear()
        regions.release(tags, backup=False)
        regions.resume(tags)
        assert seen == [KV, WEIGHTS, GRAPHS, GRAPHS, WEIGHTS, KV]


def test_weights_that_cannot_be_kept_leave_everything_resident(
    regions: Regions, slots: dict[Region, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: Arena) -> None:
        raise MemoryRefused("w", why="y", fix="f")

    monkeypatch.setattr(type(regions[WEIGHTS]), "keep", full)
    with pytest.raises(MemoryRefused):
        regions.release(list(Region), backup=True)
    assert set(regions.states.values()) == {RESIDENT}
    assert all((slot == 9).all() for slot in slots.values())


@pytest.mark.parametrize("backup", [False, True])
def test_a_gpu_without_the_saver_refuses_and_nothing_changes(
    make_plan: MakePlan, backup: bool
) -> None:
    regions = Regions(make_plan().memory, torch.device("cuda"))
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        regions.release(list(Region), backup=backup)
    assert set(regions.states.values()) == {RESIDENT}
    assert set(regions.resume(list(Region)).already) == set(Region)


@pytest.mark.parametrize("weights", [False, True])
def test_the_plan_says_what_a_gpu_keeps(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    """Keys and values never; graphs always; weights by --enable-weights-cpu-backup."""
    monkeypatch.setattr(room, "load_saver", lambda: None)
    memory = make_plan(memory={"saver": True, "weights_backup": weights}).memory
    regions = Regions(memory, torch.device("cuda"))
    keeps: set[Region] = set()
    for region in Region:
        with suppress(ConfigError):
            regions[region].keep()
            keeps.add(region)
    assert keeps == ({WEIGHTS, GRAPHS} if weights else {GRAPHS})


def test_a_cpu_needs_no_saver(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)  # type: ignore[arg-type]
    regions = Regions(make_plan(memory={"saver": True}).memory, CPU)
    assert regions.release(list(Region), backup=True).already == ()
