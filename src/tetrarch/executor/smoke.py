# SPDX-License-Identifier: Apache-2.0
"""The first steps an executor runs, before anybody may send it one."""

from __future__ import annotations

from tetrarch.config.plan import Plan
from tetrarch.core.units import ceil_div
from tetrarch.executor.capacity import Capacity
from tetrarch.executor.step import Phase, SampleSpec, SeqChunk, Step

__all__ = ["smoke_steps"]

_GREEDY = SampleSpec(temperature=0.0)
_CPU_TOKENS = 1024  # a CPU's buffers grow with the batch, so a longer forward proves no more


def smoke_steps(plan: Plan, capacity: Capacity) -> tuple[Step, ...]:
    """Return one token alone, the widest decode and the longest prefill.

    A combination of kernel and shape that the hardware refuses then stops the start, not the
    first client. No step reads a key that it did not write: fresh pages hold anything.
    """
    most = plan.experts.budget.per_rank
    longest = min(most, _CPU_TOKENS) if plan.device.torch_device == "cpu" else most
    widest = min(plan.schedule.max_running_requests, most)
    context_len = plan.model.context_len
    prefill = [context_len] * (longest // context_len) + [longest % context_len]
    return (
        _step(Phase.DECODE, [1], capacity),
        _step(Phase.DECODE, [1] * widest, capacity),
        _step(Phase.PREFILL, [length for length in prefill if length], capacity),
    )


def _step(phase: Phase, lengths: list[int], capacity: Capacity) -> Step:
    """Lay sequences of these lengths out in fresh pages, as many as fit."""
    seqs: list[SeqChunk] = []
    used = 0
    for row, length in enumerate(lengths):
        end = used + ceil_div(length, capacity.page_size)
        if end > capacity.num_pages:
            break
        pages = tuple(range(used, end))
        seqs.append(
            SeqChunk(row=row, token_ids=(0,) * length, start=0, pages=pages, samples=(_GREEDY,))
        )
        used = end
    num_tokens = sum(len(seq.token_ids) for seq in seqs)
    return Step(phase=phase, seqs=tuple(seqs), rank_tokens=(num_tokens,))
