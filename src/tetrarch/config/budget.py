# SPDX-License-Identifier: Apache-2.0
"""How many tokens a forward can hold, at worst.

Allocation, validation, scheduler admission and tests all come here, so that they cannot drift.
Every function takes resolved sub-plans: a budget taken before speculation is resolved does not
type-check.
"""

from __future__ import annotations

from tetrarch.config.plan import (
    GraphPlan,
    ParallelPlan,
    SchedulePlan,
    SpecPlan,
    TokenBudget,
)
from tetrarch.core.errors import BudgetTooSmall

__all__ = ["max_step_tokens", "prompt_allowance", "token_budget", "tokens_per_request"]


def tokens_per_request(spec: SpecPlan | None) -> int:
    """Return the most tokens a running request contributes to one step.

    An adaptive number of drafts only ever shrinks, so that it does not matter here.
    """
    return max(spec.num_draft_tokens, 1) if spec else 1


def prompt_allowance(schedule: SchedulePlan, *, num_decodes: int, head_tokens: int) -> int:
    """Return how many prompt tokens a step may take; the scheduler admits by this.

    Args:
        schedule: The limits.
        num_decodes: Running requests that generate in the same step.
        head_tokens: Prompt tokens still to compute of the request that waits longest. Where
            prompts are not chunked it runs whole, even above `max_prefill_tokens`.
    """
    rides_along = schedule.mixed_chunk and schedule.chunk_tokens > 0
    if num_decodes and not rides_along:
        return 0
    if schedule.chunk_tokens:
        return min(schedule.chunk_tokens, schedule.max_prefill_tokens)
    return max(schedule.max_prefill_tokens, head_tokens)


def max_step_tokens(
    schedule: SchedulePlan, spec: SpecPlan | None, *, num_decodes: int, head_tokens: int
) -> int:
    """Return the most tokens of a step: the prompt allowance and the decodes together."""
    decodes = num_decodes * tokens_per_request(spec)
    return decodes + prompt_allowance(schedule, num_decodes=num_decodes, head_tokens=head_tokens)


def token_budget(
    schedule: SchedulePlan,
    spec: SpecPlan | None,
    *,
    graphs: GraphPlan,
    parallel: ParallelPlan,
    dispatch: str,
    context_len: int,
) -> TokenBudget:
    """Return the worst case over prefill, captured prefill and decode.

    Args:
        schedule: Who may run, and how prompts are cut.
        spec: `None` where speculation is resolved to off.
        graphs: What is captured; a replayed step is padded to the captured size.
        parallel: The ranks.
        dispatch: `all_gather`: every rank sees all rows. `all_to_all`: a rank sees at most what
            every rank may send.
        context_len: The longest request, in tokens.

    Raises:
        BudgetTooSmall: `max_dispatch_tokens` does not hold the largest forward of a rank.
    """
    size, term = max(
        (_prefill(schedule, spec, context_len), _captured(graphs), _decode(schedule, graphs, spec)),
        key=lambda sized: sized[0],
    )
    if dispatch != "all_to_all":
        return TokenBudget(per_rank=size, rows=size * parallel.dp, term=term)
    limit = parallel.max_dispatch_tokens or size
    if limit < size:
        raise BudgetTooSmall(
            f"--max-dispatch-tokens: {size} tokens required, capacity {limit}",
            why=f"the largest forward of a rank has {size} tokens: {term}",
            fix=f"--max-dispatch-tokens {size}, or leave it out, or make that term smaller",
        )
    return TokenBudget(per_rank=size, rows=limit * parallel.ep, term=term)


def _prefill(schedule: SchedulePlan, spec: SpecPlan | None, context_len: int) -> tuple[int, str]:
    if not schedule.chunk_tokens:
        size = max_step_tokens(schedule, spec, num_decodes=0, head_tokens=context_len)
        whole = f"--max-prefill-tokens {schedule.max_prefill_tokens}"
        longest = f"a whole prompt of --context-length {context_len}"
        return size, whole if size > context_len else longest
    riders = schedule.max_running_requests if schedule.mixed_chunk else 0
    size = max_step_tokens(schedule, spec, num_decodes=riders, head_tokens=context_len)
    chunk = f"a chunk of {prompt_allowance(schedule, num_decodes=riders, head_tokens=0)}"
    each = tokens_per_request(spec)
    return size, f"{chunk} and {riders} running requests x {each}" if riders else chunk


def _captured(graphs: GraphPlan) -> tuple[int, str]:
    size = graphs.max_prefill_tokens
    return size, f"a captured prefill of {size} (--graph-max-prefill-tokens)"


def _decode(schedule: SchedulePlan, graphs: GraphPlan, spec: SpecPlan | None) -> tuple[int, str]:
    batch = max(schedule.max_running_requests, graphs.max_decode_batch)
    flag = (
        "--max-running-requests" if batch == schedule.max_running_requests else "--graph-max-batch"
    )
    each = tokens_per_request(spec)
    return batch * each, f"a decode batch of {batch} ({flag}) x {each} tokens"
