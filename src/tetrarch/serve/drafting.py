# SPDX-License-Identifier: Apache-2.0
"""Speculation's counters, each said once: what it counts, and every name that it is read under.

`/generate`, `/server_info`, `/metrics` and docs/reference/http.md are all read off these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tetrarch.engine.acceptance import Acceptance, SpecStatus

__all__ = ["COUNTERS", "LENGTHS", "DraftCounter", "DraftGauge", "as_meta", "as_metrics", "as_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounter:
    """One quantity of an `Acceptance`.

    Attributes:
        key: In `/server_info`, below `speculation.lifetime` and `speculation.since_flush`.
        about: What it counts.
        read: Its value.
        meta: In `meta_info` of `/generate`; empty: not there.
        metric: In `/metrics`; a total since the start, or a mean since the last flush. Empty: not
            there.
    """

    key: str
    about: str
    read: Callable[[Acceptance], Any]
    meta: str = ""
    metric: str = ""

    @property
    def is_total(self) -> bool:
        """Whether the metric only grows."""
        return self.metric.endswith("_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGauge:
    """How much is drafted at this moment.

    Attributes:
        metric: In `/metrics`.
        about: What it says.
        read: Its value.
        key: In `/server_info`, below `speculation`; empty: not there.
    """

    metric: str
    about: str
    read: Callable[[SpecStatus], int]
    key: str = ""


COUNTERS: tuple[DraftCounter, ...] = (
    DraftCounter(
        key="num_verifies",
        about="Steps in which drafts were verified",
        read=lambda found: found.num_verifies,
        meta="spec_verify_ct",
        metric="sglang:spec_verify_calls_total",
    ),
    DraftCounter(
        key="num_tokens",
        about="Output tokens of these steps: accepted drafts, and the model's own token after them",
        read=lambda found: found.num_tokens,
        metric="tetrarch:spec_verified_tokens_total",
    ),
    DraftCounter(
        key="num_proposed",
        about="Drafts that were verified",
        read=lambda found: found.num_proposed,
        meta="spec_num_proposed_drafts",
        metric="tetrarch:spec_proposed_drafts_total",
    ),
    DraftCounter(
        key="num_accepted",
        about="Drafts that were what the model said",
        read=lambda found: found.num_accepted,
        meta="spec_num_correct_drafts",
        metric="tetrarch:spec_accepted_drafts_total",
    ),
    DraftCounter(
        key="histogram",
        about="How many of these steps accepted 0, 1, 2, … drafts",
        read=lambda found: list(found.histogram),
        meta="spec_correct_drafts_histogram",
    ),
    DraftCounter(
        key="length",
        about="Mean of output tokens a verification; the first token, which the prompt yields, is "
        "in none",
        read=lambda found: found.length,
        meta="spec_accept_length",
        metric="sglang:spec_accept_length",
    ),
    DraftCounter(
        key="rate",
        about="Share of the verified drafts that were accepted",
        read=lambda found: found.rate,
        meta="spec_accept_rate",
        metric="sglang:spec_accept_rate",
    ),
)

LENGTHS: tuple[DraftGauge, ...] = (
    DraftGauge(
        key="num_steps",
        metric="sglang:spec_num_steps",
        about="Drafts that a new request begins with now; fewer than --speculative-num-steps, down "
        "to 0, only under --speculative-adaptive",
        read=lambda spec: spec.num_steps,
    ),
    DraftGauge(
        metric="sglang:spec_num_draft_tokens",
        about="Tokens verified at once: these drafts, and the token before them",
        read=lambda spec: spec.num_steps + 1,
    ),
)


def as_meta(found: Acceptance | None) -> dict[str, Any]:
    """Return what `meta_info` says about one output; nothing where no draft was verified."""
    if found is None:
        return {}
    return {row.meta: row.read(found) for row in COUNTERS if row.meta}


def as_state(spec: SpecStatus | None) -> dict[str, Any]:
    """Return what `/server_info` says; a benchmark flushes before it begins, and reads the mean."""
    if spec is None:
        return {}
    recent = spec.since_flush if spec.since_flush.num_verifies else spec.lifetime
    return {
        "avg_spec_accept_length": recent.length,
        "speculation": {
            **{row.key: row.read(spec) for row in LENGTHS if row.key},
            **{
                name: {row.key: row.read(found) for row in COUNTERS}
                for name, found in (("lifetime", spec.lifetime), ("since_flush", spec.since_flush))
            },
        },
    }


def as_metrics(spec: SpecStatus | None) -> dict[str, tuple[str, float]]:
    """Return what `/metrics` says: name → what it is, value."""
    if spec is None:
        return {}
    gauges = {row.metric: (f"{row.about}.", float(row.read(spec))) for row in LENGTHS}
    for row in COUNTERS:
        if row.metric:
            found, since = (
                (spec.lifetime, "the start") if row.is_total else (spec.since_flush, "/flush_cache")
            )
            gauges[row.metric] = (f"{row.about}. Since {since}.", float(row.read(found)))
    return gauges
