# SPDX-License-Identifier: Apache-2.0
"""The executor is a rank, and so is the fake that most tests of this room run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tetrarch.engine.rank import Rank

MEMBERS = sorted(name for name in vars(Rank) if not name.startswith("_"))


def test_executor_and_fake_have_every_member(
    shared_rank: Any, make_bench: Callable[..., Any]
) -> None:
    assert "launch" in MEMBERS
    for rank in (shared_rank, make_bench().executor):
        assert [name for name in MEMBERS if name not in dir(rank)] == []


def test_the_fake_agrees_with_the_executor_about_states_and_regions(
    shared_rank: Any, make_bench: Callable[..., Any]
) -> None:
    """The same releases and resumes, the same states: so tests over the fake tell something."""
    fake = make_bench().executor
    regions = list(shared_rank.region_states)
    weights, cache, graphs = (next(r for r in regions if r == tag) for tag in sorted(regions)[::-1])
    for verb, tags in [
        ("release", [cache]),
        ("release", [weights, cache]),
        ("resume", [weights]),
        ("resume", [weights, graphs]),
        ("release", regions),
        ("resume", regions),
    ]:
        real, mimicked = (vars(type(rank))[verb](rank, tags) for rank in (shared_rank, fake))
        assert set(real.already) == set(mimicked.already)
        assert fake.region_states == shared_rank.region_states
        assert fake.state == shared_rank.state
