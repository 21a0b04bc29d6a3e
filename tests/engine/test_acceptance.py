# SPDX-License-Identifier: Apache-2.0
"""Counters of drafts are exact."""

from __future__ import annotations

import random

import msgspec

from tetrarch.engine.acceptance import Acceptance, SpecStatus


def test_means_are_over_all_verifications() -> None:
    rng, counts = random.Random(0), Acceptance()
    found = [(3, rng.randint(0, 3)) for _ in range(100)]
    for proposed, accepted in found:
        counts.add(proposed=proposed, accepted=accepted, tokens=accepted + 1)
    right = [accepted for _, accepted in found]
    assert counts.length == 1 + sum(right) / 100
    assert counts.rate == sum(right) / 300
    assert counts.histogram == [right.count(number) for number in range(4)]


def test_before_the_first_verification_means_are_zero() -> None:
    assert (Acceptance().length, Acceptance().rate) == (0.0, 0.0)


def test_a_copy_stays_as_it_is() -> None:
    counts = Acceptance()
    counts.add(proposed=3, accepted=1, tokens=2)
    copy = counts.copy()
    counts.add(proposed=3, accepted=1, tokens=2)
    assert (copy.num_verifies, copy.histogram) == (1, [0, 1])


def test_a_status_crosses_to_the_doors() -> None:
    status = SpecStatus(
        num_steps=3, lifetime=Acceptance(histogram=[1, 2]), since_flush=Acceptance()
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=SpecStatus) == status
