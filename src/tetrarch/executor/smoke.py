# SPDX-License-Identifier: Apache-2.0
"""The first steps an executor runs, before anybody may send it one."""

from __future__ import annotations

from dataclasses import dataclass

from tetrarch.config.budget import tokens_per_request
from tetrarch.config.plan import Plan
from tetrarch.core.units import ceil_div
from tetrarch.executor.capacity import Capacity
from tetrarch.executor.step import (
    DraftWork,
    Phase,
    PromptScoring,
    SampleSpec,
    SeqChunk,
    Step,
)

__all__ = ["smoke_steps"]

_GREEDY = SampleSpec(temperature=0.0)
# On a GPU pages take what the largest steps leave, so that these ask for all that takes memory.
_THOROUGH = SampleSpec(
    temperature=1.0, top_p=0.9, min_p=0.01, frequency_penalty=0.1, output_ids=(0,), top_logprobs=8
)
_CPU_TOKENS = 1024  # a CPU's buffers grow with the batch, so a longer forward proves no more


def smoke_steps(plan: Plan, capacity: Capacity) -> tuple[Step, ...]:
    """Return one token alone, the widest decode and the longest prefill.

    With speculation the draft works in all of them, and the widest verification comes last.

    A combination of kernel and shape that the hardware refuses then stops the start, not the
    first client. No step reads a key that it did not write: fresh pages hold anything.
    """
    each = tokens_per_request(plan.spec)
    work = None if plan.spec is None else DraftWork(next_id=None, num_drafts=each - 1)
    is_cpu = plan.device.torch_device == "cpu"
    layout = _Layout(capacity, work, _GREEDY if is_cpu else _THOROUGH, scores=not is_cpu)
    most = plan.experts.budget.per_rank
    longest = min(most, _CPU_TOKENS) if is_cpu else most
    widest = min(plan.schedule.max_running_requests, most)
    context_len = plan.model.context_len
    prefill = [context_len] * (longest // context_len) + [longest % context_len]
    steps = (
        layout.step(Phase.DECODE, [1]),
        layout.step(Phase.DECODE, [1] * widest),
        layout.step(Phase.PREFILL, [length for length in prefill if length]),
    )
    if plan.spec is None:
        return steps
    return *steps, layout.step(Phase.VERIFY, [each] * min(widest, most // each), num_samples=each)


@dataclass(frozen=True, slots=True)
class _Layout:
    capacity: Capacity
    work: DraftWork | None
    spec: SampleSpec
    scores: bool  # every token of a prompt

    def step(self, phase: Phase, lengths: list[int], *, num_samples: int = 1) -> Step:
        """Lay sequences of these lengths out in fresh pages, as many as fit.

        Behind each is room for what the draft proposes, as far as there is any at all.
        """
        seqs: list[SeqChunk] = []
        used, size = 0, self.capacity.page_size
        ahead = 0 if self.work is None else self.work.num_drafts - 1
        for row, length in enumerate(lengths):
            if used + ceil_div(length, size) > self.capacity.num_pages:
                break
            scoring = PromptScoring(first=0, targets=(0,) * (length - 1)) if self.scores else None
            end = min(used + ceil_div(length + ahead, size), self.capacity.num_pages)
            seqs.append(
                SeqChunk(
                    row=row,
                    token_ids=(0,) * length,
                    start=0,
                    pages=tuple(range(used, end)),
                    samples=(self.spec,) * num_samples,
                    scoring=scoring if phase is Phase.PREFILL else None,
                    draft=self.work,
                )
            )
            used = end
        num_tokens = sum(len(seq.token_ids) for seq in seqs)
        return Step(phase=phase, seqs=tuple(seqs), rank_tokens=(num_tokens,))
