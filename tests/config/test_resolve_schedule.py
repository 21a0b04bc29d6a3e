# SPDX-License-Identifier: Apache-2.0
"""Who may run, how prompts are cut, how much is remembered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import Plan, SpecPlan
from tetrarch.config.resolve_schedule import resolve_schedule
from tetrarch.core.errors import TetrarchError


def why(plan: Plan, field: str) -> str:
    (reason,) = [d.why for d in plan.decisions if d.field == field]
    return reason


@pytest.mark.parametrize(
    ("arch", "chunk", "running", "fraction"),
    [(Arch.CPU, 512, 64, 0.3), (Arch.SM90, 8192, 256, 0.9), (Arch.SM120, 8192, 256, 0.9)],
)
def test_devices_have_their_own_defaults_with_a_reason(
    settle: Callable[..., Plan], arch: Arch, chunk: int, running: int, fraction: float
) -> None:
    plan = settle(arch=arch)
    assert (plan.schedule.chunk_tokens, plan.schedule.max_running_requests) == (chunk, running)
    assert plan.memory.fraction == fraction
    assert plan.memory.page_size == 16
    kind = "for a CPU" if arch is Arch.CPU else "for a GPU"
    for field in ("chunked_prefill_size", "max_running_requests", "kv_cache_fraction"):
        assert why(plan, field).startswith(kind)


def test_a_cpu_is_not_given_more_pages_than_its_requests_can_fill(
    settle: Callable[..., Plan],
) -> None:
    assert settle(max_running_requests=4).memory.max_total_tokens == 4 * 40960
    assert settle(arch=Arch.SM90).memory.max_total_tokens is None
    assert settle(max_total_tokens=100).memory.max_total_tokens == 100


def test_a_backup_needs_memory_that_can_be_released(
    settle: Callable[..., Plan], refusals: Callable[..., list[TetrarchError]]
) -> None:
    """A GPU's can with the saver, a CPU's always."""
    kept = {"enable_weights_cpu_backup": True}
    (error,) = refusals(arch=Arch.SM90, **kept)
    assert "--enable-memory-saver" in error.fix
    both = settle(arch=Arch.SM90, enable_memory_saver=True, **kept).memory
    assert (both.saver, both.weights_backup) == (True, True)
    alone = settle(**kept).memory
    assert (alone.saver, alone.weights_backup) == (False, True)
    assert not settle().memory.weights_backup


@pytest.mark.parametrize(
    ("chunk", "limit", "page", "tokens"),
    [
        (512, 16384, 16, 512),
        (520, 16384, 16, 512),
        (1000, 16384, 64, 960),
        (5, 16384, 16, 16),
        (512, 100, 16, 96),
        (None, 256, 16, 256),
        (0, 16384, 16, 0),
        (-1, 16384, 16, 0),
    ],
)
def test_a_chunk_is_capped_and_a_whole_number_of_pages(
    settle: Callable[..., Plan], chunk: int | None, limit: int, page: int, tokens: int
) -> None:
    plan = settle(chunked_prefill_size=chunk, max_prefill_tokens=limit, page_size=page)
    assert plan.schedule.chunk_tokens == tokens
    if tokens not in (chunk, 0):
        assert why(plan, "chunked_prefill_size") != "asked for"


def test_uncut_prompts_do_not_mix(settle: Callable[..., Plan]) -> None:
    plan = settle(chunked_prefill_size=-1)
    assert not plan.schedule.mixed_chunk
    assert "not cut" in why(plan, "mixed_chunk")
    assert plan.experts.budget.per_rank == 40960
    assert settle().schedule.mixed_chunk


@pytest.mark.parametrize(
    ("arch", "asked", "overlaps"),
    [
        (Arch.CPU, "auto", False),
        (Arch.CPU, "on", True),
        (Arch.SM90, "auto", True),
        (Arch.SM90, "off", False),
    ],
)
def test_steps_overlap_on_a_gpu_and_elsewhere_if_asked(
    settle: Callable[..., Plan], arch: Arch, asked: str, overlaps: bool
) -> None:
    plan = settle(arch=arch, overlap_schedule=asked)
    assert plan.schedule.overlap == overlaps
    assert (why(plan, "overlap_schedule") == "asked for") == (asked != "auto")


def test_steps_do_not_overlap_with_speculation(machine: Callable[..., Device]) -> None:
    spec = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
    ledger, gpu = Ledger(), machine(Arch.SM90)
    assert not resolve_schedule(LaunchArgs(), spec, gpu, ledger).overlap
    assert not ledger.errors
    resolve_schedule(LaunchArgs(overlap_schedule="on"), spec, gpu, ledger)
    (error,) = ledger.errors
    assert error.what == "--overlap-schedule on contradicts speculation"


def test_a_step_smaller_than_a_page_is_refused(
    refusals: Callable[..., list[TetrarchError]],
) -> None:
    (error,) = refusals(max_prefill_tokens=8)
    assert "page of 16" in error.what


def test_two_sizes_of_the_cache_are_refused(refusals: Callable[..., list[TetrarchError]]) -> None:
    (error,) = refusals(kv_cache_bytes=1 << 30, kv_cache_fraction=0.5)
    assert "both size the KV cache" in error.what


def test_the_cache_can_be_sized_in_bytes(settle: Callable[..., Plan]) -> None:
    assert settle(kv_cache_bytes=1 << 30).memory.kv_bytes == 1 << 30


def test_speculation_bounds_who_may_run(machine: Callable[..., Device]) -> None:
    spec = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
    ledger = Ledger()
    assert resolve_schedule(LaunchArgs(), spec, machine(), ledger).max_running_requests == 48
    asked = LaunchArgs(max_running_requests=100)
    assert resolve_schedule(asked, spec, machine(), ledger).max_running_requests == 100
