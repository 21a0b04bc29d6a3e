# SPDX-License-Identifier: Apache-2.0
"""No forward is larger than the budget, whatever the settings."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tetrarch.config.budget import (
    max_step_tokens,
    prompt_allowance,
    token_budget,
    tokens_per_request,
)
from tetrarch.config.cli import parse_args
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import GraphPlan, ParallelPlan, Plan, SchedulePlan, SpecPlan, TokenBudget
from tetrarch.config.resolve_schedule import resolve_schedule
from tetrarch.core.errors import BudgetTooSmall, CapacityExceeded
from tetrarch.engine.adaptive import DraftLengths

ONE_RANK = ParallelPlan(tp=1, dp=1, ep=1)
NO_GRAPHS = GraphPlan(max_decode_batch=0, max_prefill_tokens=0)


def schedule(
    *, running: int = 1, prefill: int = 16384, chunk: int = 0, mixed: bool = False
) -> SchedulePlan:
    return SchedulePlan(
        max_running_requests=running,
        max_prefill_tokens=prefill,
        chunk_tokens=chunk,
        mixed_chunk=mixed,
        prefix_cache=True,
    )


def budget(
    plan: SchedulePlan,
    spec: SpecPlan | None = None,
    *,
    graphs: GraphPlan = NO_GRAPHS,
    parallel: ParallelPlan = ONE_RANK,
    dispatch: str = "all_gather",
    context: int = 1,
) -> TokenBudget:
    return token_budget(
        plan, spec, graphs=graphs, parallel=parallel, dispatch=dispatch, context_len=context
    )


# The three cases that came with the upstream fix, as command lines.


def sized(device: Device, command: str) -> TokenBudget:
    """The budget of a command line on `device`, for a model whose context is 40960.

    `resolve` refuses graphs until they exist, and drafts of a model without an MTP layer, so their
    plans are read off the flags.
    """
    args = parse_args(command.split(), {})
    drafts = args.speculative_num_draft_tokens
    spec = SpecPlan("mtp", num_steps=drafts - 1, num_draft_tokens=drafts) if drafts else None
    return budget(
        resolve_schedule(args, spec, device, Ledger()),
        spec,
        graphs=GraphPlan(args.graph_max_batch or 0, args.graph_max_prefill_tokens or 0),
        context=args.context_length or 40960,
    )


def test_upstream_default_is_bound_by_prefill(machine: Callable[..., Device]) -> None:
    command = "--chunked-prefill-size -1 --context-length 8192 --cuda-graph-max-bs 512"
    size = sized(machine(Arch.SM100), command)
    assert size.per_rank == 16384
    assert "--max-prefill-tokens 16384" in size.term


def test_upstream_speculation_scales_the_decode_bound(machine: Callable[..., Device]) -> None:
    command = "--max-prefill-tokens 512 --cuda-graph-max-bs 512"
    draft = " --speculative-algorithm NEXTN --speculative-num-draft-tokens 8"
    size = sized(machine(Arch.SM100), command + draft)
    assert size.per_rank == 512 * 8 == 4096
    assert "512" in size.term
    assert "--graph-max-batch" in size.term
    assert sized(machine(Arch.SM100), command).per_rank == 512 + 256  # the case can fail


def test_upstream_prefill_graphs_count_only_when_on(machine: Callable[..., Device]) -> None:
    command = "--max-prefill-tokens 512 --no-mixed-chunk --cuda-graph-max-bs 64"
    off, on = " --disable-piecewise-cuda-graph", " --piecewise-cuda-graph-max-tokens 2048"
    assert sized(machine(Arch.SM100), command + off).per_rank == 512
    assert sized(machine(Arch.SM100), command + on).per_rank == 2048  # the case can fail


# The eight cases that the upstream bound misses.


def test_case_1_an_uncut_prompt_may_be_as_long_as_the_context() -> None:
    size = budget(schedule(prefill=16384), context=40960)
    assert size.per_rank == 40960
    assert "--context-length 40960" in size.term
    assert prompt_allowance(schedule(), num_decodes=0, head_tokens=40960) == 40960


def test_case_2_max_prefill_tokens_caps_the_chunk_for_scheduler_and_budget_alike() -> None:
    plan = schedule(chunk=32768, prefill=16384)
    assert budget(plan, context=40960).per_rank == 16384
    assert prompt_allowance(plan, num_decodes=0, head_tokens=40960) == 16384


def test_case_2_a_chunk_that_is_no_whole_number_of_pages_is_rounded_before_it_is_used(
    settle: Callable[..., Plan],
) -> None:
    plan = settle(chunked_prefill_size=1000, page_size=64)
    assert plan.schedule.chunk_tokens == 960
    assert plan.experts.budget.per_rank == 960 + plan.schedule.max_running_requests


def test_case_3_a_prefill_graph_is_padded_above_the_chunk() -> None:
    size = budget(schedule(chunk=512), graphs=GraphPlan(0, 8192), context=40960)
    assert size.per_rank == 8192
    assert "--graph-max-prefill-tokens" in size.term


def test_case_4_running_requests_ride_along_with_a_chunk() -> None:
    plan = schedule(chunk=512, mixed=True, running=64)
    assert budget(plan, context=40960).per_rank == 512 + 64
    spec = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
    assert budget(plan, spec, context=40960).per_rank == 512 + 64 * 4
    assert "64 running requests x 4" in budget(plan, spec, context=40960).term
    alone = replace(plan, mixed_chunk=False)
    assert budget(alone, context=40960).per_rank == 512


def test_case_5_an_eager_decode_batch_may_exceed_the_largest_graph() -> None:
    spec = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
    size = budget(schedule(chunk=512, running=300), spec, graphs=GraphPlan(64, 0))
    assert size.per_rank == 300 * 4
    assert "--max-running-requests" in size.term


def test_case_6_adaptive_speculation_never_drafts_more_than_the_flag() -> None:
    """Elsewhere it can; here a chain grows up to the flag at most, so that both cost the same."""
    static = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
    adaptive = replace(static, adaptive=True)
    plan = schedule(chunk=128, running=100)
    assert tokens_per_request(adaptive) == DraftLengths(adaptive).most + 1 == 4
    assert budget(plan, static).per_rank == budget(plan, adaptive).per_rank == 400


def test_case_7_warm_up_batches_fit() -> None:
    spec = SpecPlan("mtp", num_steps=3, num_draft_tokens=4)
    graphs = GraphPlan(max_decode_batch=512, max_prefill_tokens=1024)
    size = budget(schedule(chunk=256, running=16), spec, graphs=graphs)
    dummies = [batch * 4 for batch in (1, 64, 512)] + [256, 1024]
    assert max(dummies) <= size.per_rank


def test_case_8_a_rank_without_tokens_is_no_special_case() -> None:
    size = budget(schedule(chunk=512), parallel=ParallelPlan(tp=1, dp=4, ep=4))
    assert size.rows == 4 * 512  # three of the ranks may be idle
    size.require(0)
    assert prompt_allowance(schedule(chunk=512), num_decodes=0, head_tokens=0) == 512


# Rows of an expert layer.


def test_all_gather_rows_are_the_tokens_of_all_data_parallel_ranks() -> None:
    size = budget(schedule(chunk=512), parallel=ParallelPlan(tp=2, dp=4, ep=8))
    assert (size.per_rank, size.rows) == (512, 2048)


def all_to_all(limit: int | None) -> TokenBudget:
    parallel = ParallelPlan(tp=1, dp=8, ep=8, max_dispatch_tokens=limit)
    plan = schedule(chunk=512, mixed=True, running=64)
    return budget(plan, parallel=parallel, dispatch="all_to_all", context=4096)


def test_all_to_all_rows_follow_the_limit_of_one_rank() -> None:
    assert all_to_all(None).rows == 576 * 8
    assert all_to_all(1000).rows == 1000 * 8
    assert all_to_all(576).rows == 576 * 8


def test_a_limit_below_the_largest_forward_is_refused_with_every_number() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        all_to_all(575)
    error = caught.value
    assert "576 tokens required, capacity 575" in error.what
    assert "a chunk of 512 and 64 running requests x 1" in error.why
    assert "--max-dispatch-tokens 576" in error.fix


def test_a_runner_handed_too_many_rows_says_what_set_its_capacity() -> None:
    size = budget(schedule(chunk=512, mixed=True, running=64))
    size.require(size.rows)
    with pytest.raises(CapacityExceeded) as caught:
        size.require(size.rows + 1)
    assert "577 rows" in caught.value.what
    assert size.term in caught.value.why


# The scheduler can never outgrow the budget.


def simulated_step(plan: SchedulePlan, spec: SpecPlan | None, draw: random.Random) -> int:
    """Tokens of one step as a scheduler forms it: decodes first, then as many prompts as fit."""
    decodes = draw.randint(0, plan.max_running_requests)
    waiting = [draw.randint(1, 3000) for _ in range(draw.randint(0, 5))]
    q = tokens_per_request(spec)
    if waiting and not prompt_allowance(plan, num_decodes=decodes, head_tokens=waiting[0]):
        decodes = draw.choice((0, decodes))  # prompts and decodes take turns
    if not waiting:
        return decodes * q
    allowance = prompt_allowance(plan, num_decodes=decodes, head_tokens=waiting[0])
    prompt = 0
    for length in waiting:
        part = min(length, allowance - prompt) if plan.chunk_tokens else length
        if prompt + part > allowance:
            break
        prompt += part
    assert prompt + decodes * q <= max_step_tokens(
        plan, spec, num_decodes=decodes, head_tokens=waiting[0]
    )
    return prompt + decodes * q


@pytest.mark.parametrize("seed", range(200))
def test_no_simulated_step_exceeds_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    plan = schedule(
        running=draw.randint(1, 300),
        prefill=draw.choice((1, 16, 500, 2048, 16384)),
        chunk=draw.choice((0, 1, 16, 512, 4096)),
        mixed=draw.random() < 0.5,
    )
    spec = SpecPlan("mtp", 3, draw.randint(1, 8), draw.choice((0, 9))) if seed % 2 else None
    graphs = GraphPlan(draw.choice((0, 64, 512)), draw.choice((0, 1024)))
    size = budget(plan, spec, graphs=graphs, context=3000)
    largest = max(simulated_step(plan, spec, draw) for _ in range(200))
    assert largest <= size.per_rank
    assert graphs.max_decode_batch * tokens_per_request(spec) <= size.per_rank
    assert graphs.max_prefill_tokens <= size.per_rank


def test_the_budget_is_tight() -> None:
    """A bound that is merely large would pass every test above."""
    plan = schedule(chunk=512, mixed=True, running=64)
    most = max_step_tokens(plan, None, num_decodes=64, head_tokens=4096)
    assert budget(plan, context=4096).per_rank == most == 576


def test_decodes_and_whole_prompts_take_turns() -> None:
    assert prompt_allowance(schedule(mixed=True), num_decodes=1, head_tokens=9) == 0
    assert prompt_allowance(schedule(chunk=64), num_decodes=1, head_tokens=9) == 0
    assert prompt_allowance(schedule(chunk=64, mixed=True), num_decodes=1, head_tokens=9) == 64


# Order is held by types.

SNIPPET = """
from tetrarch.config.args import LaunchArgs
from tetrarch.config.budget import max_step_tokens, token_budget
from tetrarch.config.cli import parse_args
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import GraphPlan, ParallelPlan, SchedulePlan, SpecPlan, TokenBudget

def take(
    args: LaunchArgs, schedule: SchedulePlan, spec: SpecPlan | None, graphs: GraphPlan,
    parallel: ParallelPlan,
) -> TokenBudget:
    return token_budget(
        schedule, {spec}graphs=graphs, parallel=parallel, dispatch="all_gather", context_len=1
    )
"""


def test_a_budget_taken_before_speculation_is_resolved_does_not_type_check(tmp_path: Path) -> None:
    """Three ways to take it too early, and the right one, which must pass."""
    pytest.importorskip("pyright", reason="needs the extra [check]")
    ways = {
        "resolved": "spec, ",
        "left_out": "",
        "the_flag": "args.speculative_num_draft_tokens, ",
        "the_settings": "args, ",
    }
    for name, spec in ways.items():
        (tmp_path / f"{name}.py").write_text(SNIPPET.format(spec=spec))
    config = tmp_path / "pyrightconfig.json"
    config.write_text('{"typeCheckingMode": "basic", "useLibraryCodeForTypes": true}')
    command = [sys.executable, "-m", "pyright", "-p", str(config)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    errors = [line for line in done.stdout.splitlines() if " - error: " in line]
    wrong = {Path(line.split(":", 1)[0].strip()).stem for line in errors}
    assert wrong == set(ways) - {"resolved"}, done.stdout + done.stderr
