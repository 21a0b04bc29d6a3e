# SPDX-License-Identifier: Apache-2.0
"""The KV pool's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest

from tetrarch.config.plan import Plan
from tetrarch.core.errors import ConfigError
from tetrarch.executor.capacity import free_bytes, kv_capacity

MakePlan = Callable[..., Plan]
PER_TOKEN = 100


def pages(plan: Plan, free: int) -> int:
    return kv_capacity(plan, bytes_per_token=PER_TOKEN, free=free).num_pages


def sized(make_plan: MakePlan, **memory: object) -> Plan:
    unsaid = {"max_total_tokens": None, "kv_bytes": None}
    return make_plan(memory=unsaid | memory)  # context 64, page 4, 8 running requests


def test_a_fraction_of_what_is_free_becomes_whole_pages(make_plan: MakePlan) -> None:
    plan = sized(make_plan, fraction=0.5)
    assert pages(plan, 100 * PER_TOKEN * 2) == 25
    assert pages(plan, 103 * PER_TOKEN * 2) == 25
    assert pages(plan, 104 * PER_TOKEN * 2) == 26


def test_the_operators_tokens_and_bytes_count_and_the_smaller_wins(make_plan: MakePlan) -> None:
    free = 10_000 * PER_TOKEN
    assert pages(sized(make_plan, max_total_tokens=99), free) == 24
    assert pages(sized(make_plan, kv_bytes=130 * PER_TOKEN), free) == 32
    assert pages(sized(make_plan, max_total_tokens=99, kv_bytes=130 * PER_TOKEN), free) == 24
    assert pages(sized(make_plan, max_total_tokens=200, kv_bytes=130 * PER_TOKEN), free) == 32


def test_a_size_asked_for_is_not_reduced_to_the_fraction(make_plan: MakePlan) -> None:
    assert pages(sized(make_plan, max_total_tokens=100, fraction=0.1), 100 * PER_TOKEN) == 25


def test_the_pool_is_never_larger_than_all_requests_can_fill(make_plan: MakePlan) -> None:
    """8 requests of 64 tokens fill 128 pages of 4, and 8 of 65 tokens fill 136."""
    huge = 1 << 40
    assert pages(sized(make_plan), huge) == 128
    assert pages(sized(make_plan, max_total_tokens=1 << 30), 1 << 20) == 128
    plan = sized(make_plan)
    assert pages(replace(plan, model=replace(plan.model, context_len=65)), huge) == 136


@pytest.mark.parametrize(
    ("memory", "free", "said"),
    [
        ({"max_total_tokens": 63}, 1 << 30, "--max-total-tokens 63"),
        ({"kv_bytes": 63 * PER_TOKEN}, 1 << 30, "--kv-cache-bytes 6300"),
        ({"fraction": 0.5}, 126 * PER_TOKEN, "50% of the"),
    ],
)
def test_a_pool_below_one_context_is_refused(
    make_plan: MakePlan, memory: dict[str, object], free: int, said: str
) -> None:
    """The edge: 64 tokens are enough, 63 are not."""
    with pytest.raises(ConfigError, match="does not hold one context of 64 tokens") as caught:
        pages(sized(make_plan, **memory), free)
    assert said in caught.value.why
    assert "--context-length 60" in caught.value.fix


def test_more_than_is_free_is_refused(make_plan: MakePlan) -> None:
    with pytest.raises(ConfigError, match="does not fit") as caught:
        pages(sized(make_plan, kv_bytes=100 * PER_TOKEN), 99 * PER_TOKEN)
    assert "--kv-cache-bytes 10000" in caught.value.why


def test_capacity_counts_tokens(make_plan: MakePlan) -> None:
    capacity = kv_capacity(sized(make_plan), bytes_per_token=1, free=1 << 30)
    assert (capacity.num_pages, capacity.page_size, capacity.max_total_tokens) == (128, 4, 512)


def test_free_memory_respects_a_containers_limit(make_plan: MakePlan) -> None:
    """The host may have more free than the container may use."""
    device = make_plan(device={"memory_bytes": 1 << 40}).device
    used = psutil.Process().memory_info().rss
    available = psutil.virtual_memory().available
    assert abs(free_bytes(device) - available) < 0.2 * available
    limited = free_bytes(replace(device, memory_bytes=used + (64 << 20)))
    assert 0 < limited <= 96 << 20
    assert free_bytes(replace(device, memory_bytes=used // 2)) == 0
