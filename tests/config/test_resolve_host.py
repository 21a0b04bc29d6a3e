# SPDX-License-Identifier: Apache-2.0
"""Threads, and the environment that an engine process is given."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import ParallelPlan, Plan
from tetrarch.config.resolve_host import resolve_threads


@pytest.mark.parametrize(
    ("arch", "cores", "world", "threads"),
    [
        (Arch.CPU, 16, 1, 15),
        (Arch.CPU, 17, 4, 4),
        (Arch.CPU, 2, 1, 1),
        (Arch.CPU, 1, 2, 1),
        (Arch.SM90, 96, 1, 8),
        (Arch.SM90, 5, 1, 4),
    ],
)
def test_ranks_share_the_physical_cores(
    machine: Callable[..., Device], arch: Arch, cores: int, world: int, threads: int
) -> None:
    device = machine(arch, physical_cores=cores)
    parallel = ParallelPlan(tp=1, dp=world, ep=1)
    assert resolve_threads(LaunchArgs(), parallel, device, Ledger()) == threads


def test_libraries_are_told_the_same_number(settle: Callable[..., Plan]) -> None:
    plan = settle(threads=3)
    environment = dict(plan.process_env)
    assert plan.num_threads == 3
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"


def test_idle_threads_sleep_and_nothing_reaches_out(settle: Callable[..., Plan]) -> None:
    environment = dict(settle().process_env)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_resolving_leaves_our_own_environment_alone(settle: Callable[..., Plan]) -> None:
    before = dict(os.environ)
    settle(threads=7)
    assert dict(os.environ) == before
