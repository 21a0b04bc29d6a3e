# SPDX-License-Identifier: Apache-2.0
"""What an engine counts, probes left out."""

from __future__ import annotations

from tetrarch.config.plan import Plan
from tetrarch.engine.acceptance import Acceptance, SpecStatus
from tetrarch.engine.adaptive import DraftLength, DraftLengths
from tetrarch.engine.output import Output
from tetrarch.engine.sequence import Sequence
from tetrarch.executor.step import SeqChunk, SeqResult

__all__ = ["Tally"]

_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "num_retracted_reqs",
    "steps",
    "moe_tokens_high_water",
    "moe_buffer_capacity_tokens",
)


class Tally:
    """Totals of all requests, and how their drafts fare.

    Attributes:
        totals: Monotonic, by metric name.
    """

    def __init__(self, plan: Plan) -> None:
        self.totals: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self.totals["moe_buffer_capacity_tokens"] = plan.experts.budget.rows
        self._lengths = None if plan.spec is None else DraftLengths(plan.spec)
        self._accepted = (Acceptance(), Acceptance())  # ever, and since the last flush

    def count(self, seq: Sequence, name: str, amount: int = 1) -> None:
        """Add to a total what a request brings."""
        if not seq.request.is_probe:
            self.totals[name] += amount

    def start_length(self) -> DraftLength | None:
        """Return how much to draft for a new request; `None` without speculation."""
        return None if self._lengths is None else self._lengths.start()

    def count_drafts(
        self, output: Output, chunk: SeqChunk, outcome: SeqResult, *, kept: int
    ) -> None:
        """Count a verification of which the output has kept so many tokens."""
        drawn = len(outcome.token_ids)
        accepted = min(kept, drawn if outcome.failed else drawn - 1)
        proposed = len(chunk.drafts) if kept == drawn else kept
        everybody = () if output.seq.request.is_probe else self._accepted
        for each in (output.acceptance, *everybody):
            each.add(proposed=proposed, accepted=accepted, tokens=kept)
        if output.seq.length is not None:
            output.seq.length.observe(proposed=proposed, accepted=accepted)

    def note_flush(self) -> None:
        """Count from now on what has been since the last flush."""
        self._accepted = (self._accepted[0], Acceptance())

    @property
    def spec(self) -> SpecStatus | None:
        """How speculation goes; `None` without it."""
        if self._lengths is None:
            return None
        lifetime, since_flush = self._accepted
        return SpecStatus(
            num_steps=self._lengths.current, lifetime=lifetime, since_flush=since_flush
        )
