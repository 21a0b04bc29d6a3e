# SPDX-License-Identifier: Apache-2.0
"""Totals leave probes out, and drafts are counted as far as an output has kept them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tetrarch.config.plan import Plan, SpecPlan
from tetrarch.engine.output import Output
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.engine.sequence import Sequence
from tetrarch.engine.tally import Tally
from tetrarch.executor.step import SampleSpec, SeqChunk, SeqResult

CHUNK = SeqChunk(
    row=0, token_ids=(5, 6, 7, 8), start=0, pages=(0,), samples=(SampleSpec(),) * 4
)  # three drafts


def tally(*, drafts: bool = True) -> Tally:
    plan: Any = SimpleNamespace(
        experts=SimpleNamespace(budget=SimpleNamespace(rows=77)),
        spec=SpecPlan("mtp", 3, 4) if drafts else None,
    )
    return Tally(cast("Plan", plan))


def output(counts: Tally, *, is_probe: bool = False) -> Output:
    request = GenerateRequest(
        rid="a", prompt_ids=(5,), sampling=SamplingParams(), is_probe=is_probe
    )
    length = counts.start_length()
    seq = Sequence(request, order=0, limit=99, end_ids=frozenset(), length=length)
    return Output(seq, interval=1, text=None)


def test_a_probe_is_not_traffic() -> None:
    counts = tally()
    for is_probe in (False, True):
        one = output(counts, is_probe=is_probe)
        counts.count(one.seq, "num_requests_total")
        counts.count_drafts(one, CHUNK, SeqResult(token_ids=(6, 7, 9)), kept=3)
        assert one.acceptance.num_accepted == 2
    assert counts.totals["num_requests_total"] == 1
    assert counts.totals["moe_buffer_capacity_tokens"] == 77
    assert counts.spec is not None
    assert counts.spec.lifetime.num_verifies == 1


@pytest.mark.parametrize(
    ("drawn", "kept", "proposed", "accepted"),
    [
        ((6, 7, 8, 9), 4, 3, 3),  # all were right, and one more
        ((9,), 1, 3, 0),
        ((6, 7, 9), 2, 2, 2),  # the second draft ended the output
    ],
)
def test_drafts_count_as_far_as_the_output_goes(
    drawn: tuple[int, ...], kept: int, proposed: int, accepted: int
) -> None:
    counts = tally()
    one = output(counts)
    counts.count_drafts(one, CHUNK, SeqResult(token_ids=drawn), kept=kept)
    found = one.acceptance
    assert (found.num_proposed, found.num_accepted, found.num_tokens) == (proposed, accepted, kept)


def test_a_flush_begins_the_newer_counts_anew() -> None:
    counts = tally()
    counts.count_drafts(output(counts), CHUNK, SeqResult(token_ids=(9,)), kept=1)
    counts.note_flush()
    assert counts.spec is not None
    assert (counts.spec.lifetime.num_verifies, counts.spec.since_flush.num_verifies) == (1, 0)


def test_without_speculation_nobody_drafts() -> None:
    counts = tally(drafts=False)
    assert (counts.spec, counts.start_length()) == (None, None)
