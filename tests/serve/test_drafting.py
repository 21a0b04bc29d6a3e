# SPDX-License-Identifier: Apache-2.0
"""Every counter of speculation has one row, and says the same under all its names."""

from __future__ import annotations

from tetrarch.engine.acceptance import Acceptance, SpecStatus
from tetrarch.serve.drafting import COUNTERS, as_meta, as_metrics, as_state

# 4 verifications of 3 drafts: 3, 0, 1 and 3 were right; the end token cut the last one's own token
STEPS = ((3, 4), (0, 1), (1, 2), (3, 3))


def acceptance(*steps: tuple[int, int]) -> Acceptance:
    found = Acceptance(histogram=[])
    for accepted, tokens in steps:
        found.add(proposed=3, accepted=accepted, tokens=tokens)
    return found


def test_one_output_tells_what_its_verifications_brought() -> None:
    assert as_meta(acceptance(*STEPS)) == {
        "spec_verify_ct": 4,
        "spec_num_proposed_drafts": 12,
        "spec_num_correct_drafts": 7,
        "spec_correct_drafts_histogram": [1, 1, 0, 2],
        "spec_accept_length": 10 / 4,
        "spec_accept_rate": 7 / 12,
    }
    assert as_meta(None) == {}


def test_the_state_has_both_counts_and_the_mean_of_the_newer_one() -> None:
    spec = SpecStatus(num_steps=2, lifetime=acceptance(*STEPS), since_flush=acceptance((1, 2)))
    state = as_state(spec)
    assert state["avg_spec_accept_length"] == 2.0
    assert state["speculation"]["num_steps"] == 2
    assert state["speculation"]["lifetime"] == {
        "num_verifies": 4,
        "num_tokens": 10,
        "num_proposed": 12,
        "num_accepted": 7,
        "histogram": [1, 1, 0, 2],
        "length": 2.5,
        "rate": 7 / 12,
    }
    assert state["speculation"]["since_flush"]["num_verifies"] == 1
    flushed = SpecStatus(num_steps=2, lifetime=acceptance(*STEPS), since_flush=acceptance())
    assert as_state(flushed)["avg_spec_accept_length"] == 2.5
    assert as_state(None) == {}


def test_metrics_are_totals_since_the_start_and_means_since_the_flush_and_say_so() -> None:
    spec = SpecStatus(num_steps=2, lifetime=acceptance(*STEPS), since_flush=acceptance((1, 2)))
    found = as_metrics(spec)
    assert {name: value for name, (_, value) in found.items()} == {
        "sglang:spec_num_steps": 2,
        "sglang:spec_num_draft_tokens": 3,
        "sglang:spec_verify_calls_total": 4,
        "tetrarch:spec_verified_tokens_total": 10,
        "tetrarch:spec_proposed_drafts_total": 12,
        "tetrarch:spec_accepted_drafts_total": 7,
        "sglang:spec_accept_length": 2.0,
        "sglang:spec_accept_rate": 1 / 3,
    }
    for name, (about, _) in found.items():
        is_total, is_mean = name.endswith("_total"), "accept_" in name
        assert about.endswith("Since the start.") == is_total
        assert about.endswith("Since /flush_cache.") == (is_mean and not is_total)
    assert as_metrics(None) == {}


def test_no_two_rows_share_a_name() -> None:
    keys = [row.key for row in COUNTERS]
    metas = [row.meta for row in COUNTERS if row.meta]
    metrics = [row.metric for row in COUNTERS if row.metric]
    for names in (keys, metas, metrics):
        assert len(set(names)) == len(names) >= 6
