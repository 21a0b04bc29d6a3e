# SPDX-License-Identifier: Apache-2.0
"""Requests in, deltas out: admit, step, and tell.

One thread owns an engine. It knows nothing of processes or sockets (`engine/loop.py` does), and
nothing of devices (the executor does).

Where steps overlap, the next one is launched before the results of the last one are read: the
device has work while the host reads, tells and schedules. Who wants to find everything at rest
drains the engine first.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from tetrarch.config.checkpoint import read_end_ids
from tetrarch.config.plan import Plan
from tetrarch.core.errors import RequestError
from tetrarch.engine.messages import Abort, Heartbeat
from tetrarch.engine.output import Output
from tetrarch.engine.pages import PagePool
from tetrarch.engine.rank import Rank
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest
from tetrarch.engine.scheduler import Batch, Scheduler
from tetrarch.engine.sequence import Sequence
from tetrarch.engine.stream import OutputText
from tetrarch.engine.tally import Tally
from tetrarch.engine.text import Tokenizer
from tetrarch.engine.validation import Limits, check_request
from tetrarch.executor.step import Pending, SeqChunk, SeqResult

__all__ = ["Engine"]

_NOT_FINITE = FinishReason(
    kind="abort",
    message="the logits are not finite: the weights hold NaN or Inf, or an activation overflowed",
    status=500,
    code="nan_logits",
)


class Engine:
    """Many requests over one rank.

    Attributes:
        rank: Computes the steps.
        limits: What bounds a request.
        weight_version: Reported with every output token.
        is_paused: Nobody is to call `step`; what waits may do so for long.
    """

    def __init__(self, plan: Plan, rank: Rank, tokenizer: Tokenizer | None = None) -> None:
        capacity = rank.capacity
        self.rank = rank
        self._plan, self._tokenizer = plan, tokenizer
        self._pool = PagePool(capacity.num_pages, capacity.page_size)
        self._scheduler = Scheduler(plan.schedule, self._pool)
        self._depth = 2 if plan.schedule.overlap else 1
        self._flying: deque[Pending] = deque()  # oldest first
        self._live: dict[str, Output] = {}
        self._num_seen = 0
        self._tally = Tally(plan)
        self._end_ids = read_end_ids(Path(plan.model.path))
        if tokenizer is not None:
            self._end_ids |= tokenizer.eos_ids
        self.limits = Limits(
            vocab_size=plan.model.facts.vocab_size,
            context_len=plan.model.context_len,
            max_tokens=min(plan.model.context_len, capacity.max_total_tokens),
            has_text=tokenizer is not None,
        )
        self.weight_version = "default"
        self.is_paused = False

    @property
    def counters(self) -> dict[str, float]:
        """Monotonic totals by metric name; probes are left out."""
        return self._tally.totals

    @property
    def has_work(self) -> bool:
        """Whether any request lives, or a step that nobody wants any more is in flight."""
        return bool(self._live or self._flying)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: It can never be served, or its id lives already.
        """
        if request.rid in self._live:
            raise RequestError(
                f"rid {request.rid!r} is in use",
                why="the ids of live requests are unique, so that an abort is exact",
                fix="choose another rid, or leave it out",
                param="rid",
            )
        request = check_request(request, self.limits)
        sampling, size = request.sampling, len(request.prompt_ids)
        own = frozenset(sampling.stop_token_ids)
        seq = Sequence(
            request,
            order=self._num_seen,
            limit=self.limits.max_tokens
            if sampling.max_new_tokens is None
            else min(size + sampling.max_new_tokens, self.limits.max_tokens),
            end_ids=own if sampling.ignore_eos else own | self._end_ids,
            length=self._tally.start_length(),
        )
        text = None
        if (sampling.stop or sampling.stop_regex) and self._tokenizer is not None:
            text = OutputText(self._tokenizer, sampling, request.prompt_ids)
        interval = sampling.stream_interval or self._plan.serve.stream_interval
        self._live[request.rid] = Output(seq, interval=interval, text=text)
        self._num_seen += 1
        self._scheduler.add(seq)
        self._tally.count(seq, "num_requests_total")

    def abort(self, abort: Abort, *, by: str = "the client") -> list[Delta]:
        """End requests at once, whatever they are doing; their last deltas say `by` whom."""
        finish = FinishReason(kind="abort", message=f"aborted by {by}")
        chosen = [rid for rid in self._live if _is_meant(abort, rid)]
        return [self._end(self._live[rid], finish) for rid in chosen]

    def step(self) -> list[Delta]:
        """Launch as far ahead as may be; then return what the oldest step in flight has brought."""
        while len(self._flying) < self._depth and (batch := self._scheduler.schedule()):
            self._note_starts(batch)
            self._flying.append(self.rank.launch(batch.step))
        return self._land() if self._flying else []

    def drain(self) -> list[Delta]:
        """Wait for all that is in flight, and return what it has brought."""
        deltas: list[Delta] = []
        while self._flying:
            deltas += self._land()
        return deltas

    def _land(self) -> list[Delta]:
        landed = self._scheduler.commit(self._flying.popleft().wait())
        counters = self.counters
        counters["steps"] += 1
        counters["moe_tokens_high_water"] = self.rank.moe_tokens_high_water
        counters["num_retracted_reqs"] = self._scheduler.num_retractions
        deltas: list[Delta] = []
        for seq, chunk, outcome in landed:
            deltas += self._take(self._live[seq.request.rid], chunk, outcome)
        return deltas

    @property
    def num_running(self) -> int:
        """Requests that hold keys and values."""
        return len(self._scheduler.running)

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs or is about to; a pause keeps waiting requests from that."""
        return self.num_running == 0 and (self.is_paused or not self.has_work)

    @property
    def num_paused(self) -> int:
        """Requests that a pause keeps from running."""
        return len(self._live) if self.is_paused else 0

    def retract(self) -> None:
        """Set all running requests back; they keep their tokens, and compute them again.

        As all that changes what is known of running requests, it wants nothing to be in flight.
        """
        self._scheduler.retract_all()

    def renew(self) -> None:
        """Make nothing live on that the weights before these have computed, tokens excepted."""
        self.retract()
        for output in self._live.values():
            output.seq.forget_scores()
        self._pool.clear()

    def flush(self) -> bool:
        """Empty the prefix cache; refused unless idle."""
        if not self.is_idle:
            return False
        self._pool.clear()
        self._tally.note_flush()
        return True

    def heartbeat(self) -> Heartbeat:
        """Return counts that another thread may ask for at any moment."""
        pool, at = self._pool, time.monotonic()
        return Heartbeat(
            at=at,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_used_tokens=pool.num_used * pool.page_size,
            num_cached_tokens=pool.num_cached * pool.page_size,
            max_total_tokens=pool.num_pages * pool.page_size,
            counters=dict(self.counters),
            weight_version=self.weight_version,
            model_path=self.rank.weights.path,
            state=self.rank.state,
            is_paused=self.is_paused,
            is_updating=self.rank.weights.is_open,
            updating_s=self.rank.weights.open_s,
            num_paused=self.num_paused,
            spec=self._tally.spec,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the heartbeat and more, as plain values."""
        return {
            **msgspec.to_builtins(self.heartbeat()),
            **msgspec.to_builtins(self.limits),
            "page_size": self._pool.page_size,
            "num_free_tokens": self._pool.num_free * self._pool.page_size,
            "max_running_requests": self._plan.schedule.max_running_requests,
        }

    def _take(self, output: Output, chunk: SeqChunk, outcome: SeqResult) -> list[Delta]:
        """Let a sequence have its share of a step."""
        seq = output.seq
        if outcome.failed and not chunk.drafts:
            return [self._end(output, _NOT_FINITE, is_bad=True)]
        if outcome.failed:
            # A wrong draft may be what is not finite, and a hidden NaN spoils the rows before it.
            # Without drafts and from clean pages the next steps find out.
            seq.length = None
            self._scheduler.set_back(seq, is_bad=True)
        seq.scored += outcome.prompt_logprobs
        before = seq.num_outputs
        finish = output.take(outcome.token_ids, outcome.logprobs, version=self.weight_version)
        self._tally.count(seq, "generation_tokens_total", seq.num_outputs - before)
        if chunk.drafts:
            self._tally.count_drafts(output, chunk, outcome, kept=seq.num_outputs - before)
        elif seq.length is not None and outcome.token_ids:
            seq.length.observe(proposed=0, accepted=0)
        if finish is None and seq.is_computed:
            finish = FinishReason(kind="length", length=0)
        if finish is not None:
            return [self._end(output, finish)]
        return [output.delta()] if output.is_due else []

    def _end(self, output: Output, finish: FinishReason, *, is_bad: bool = False) -> Delta:
        self._scheduler.remove(output.seq, is_bad=is_bad)
        del self._live[output.seq.request.rid]
        if finish.kind == "abort":
            self._tally.count(output.seq, "num_aborted_requests_total")
        return output.delta(finish)

    def _note_starts(self, batch: Batch) -> None:
        for seq in batch.seqs:
            output = self._live[seq.request.rid]
            if "scheduled" not in output.times:
                output.times["scheduled"] = time.monotonic()
                self._tally.count(seq, "prompt_tokens_total", seq.num_prompt)
                self._tally.count(seq, "cached_tokens_total", seq.num_cached)


def _is_meant(abort: Abort, rid: str) -> bool:
    begins = abort.prefix and abort.rid != "" and rid.startswith(abort.rid)
    return abort.everything or rid == abort.rid or begins
