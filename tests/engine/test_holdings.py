# SPDX-License-Identifier: Apache-2.0
"""The pages of a sequence: as many as it needs, known as far as it is computed."""

from __future__ import annotations

import pytest

from tetrarch.engine.holdings import Holdings
from tetrarch.engine.pages import PagePool
from tetrarch.engine.request import GenerateRequest, SamplingParams
from tetrarch.engine.sequence import Sequence

SIZE = 4


def sequence(prompt: range, *, more: int = 100) -> Sequence:
    request = GenerateRequest(rid="a", prompt_ids=tuple(prompt), sampling=SamplingParams())
    return Sequence(request, order=0, limit=len(prompt) + more, end_ids=frozenset())


@pytest.fixture
def pool() -> PagePool:
    return PagePool(6, SIZE)


@pytest.fixture
def holdings(pool: PagePool) -> Holdings:
    return Holdings(pool, prefix_cache=True)


def start(holdings: Holdings, seq: Sequence, count: int) -> None:
    """Begin a sequence, and launch so many of its tokens."""
    holdings.begin(seq, holdings.match(seq))
    assert holdings.extend(seq, count)
    seq.num_launched += count


def test_a_sequence_grows_page_by_page_until_there_are_no_more(
    pool: PagePool, holdings: Holdings
) -> None:
    seq = sequence(range(10))
    start(holdings, seq, 10)
    assert (len(seq.pages), pool.num_available) == (3, 3)
    assert holdings.num_fitting(seq) == 6 * SIZE - 10
    assert holdings.extend(seq, 2)
    assert len(seq.pages) == 3, "the last one had room"
    assert not holdings.extend(seq, 6 * SIZE - 9)
    assert len(seq.pages) == 3, "all or nothing"


def test_pages_suffice_for_everybody_or_not(pool: PagePool, holdings: Holdings) -> None:
    """Each of the two wants a page for its next token."""
    seqs = [sequence(range(first, first + SIZE)) for first in (10, 20)]
    for seq in seqs:
        start(holdings, seq, SIZE)
    assert holdings.suffice(seqs)
    pool.take(3)
    assert not holdings.suffice(seqs)
    assert holdings.suffice(seqs[:1])


def test_only_what_has_landed_is_made_known(holdings: Holdings) -> None:
    seq, other = sequence(range(10)), sequence(range(10))
    start(holdings, seq, 10)
    holdings.learn(seq)
    assert (seq.known, holdings.match(other)) == (0, ())
    seq.num_computed = 5
    holdings.learn(seq)
    assert (seq.known, holdings.match(other)) == (1, seq.pages[:1])
    assert not holdings.knows_prompt(seq)
    seq.num_computed = 10
    holdings.learn(seq)
    assert holdings.knows_prompt(seq)
    assert holdings.match(other) == seq.pages[:2]


def test_what_is_bad_is_known_no_more(holdings: Holdings) -> None:
    seq = sequence(range(10))
    start(holdings, seq, 10)
    seq.num_computed = 10
    holdings.learn(seq)
    holdings.spoil(seq)
    assert holdings.match(sequence(range(10))) == ()
    assert (seq.num_computed, seq.known) == (0, 0)


def test_pages_behind_what_is_launched_go_back(pool: PagePool, holdings: Holdings) -> None:
    seq = sequence(range(10))
    start(holdings, seq, 10)
    assert holdings.extend(seq, 10)
    assert len(seq.pages) == 5
    holdings.trim(seq)
    assert (len(seq.pages), pool.num_available) == (3, 3)


def test_a_newcomer_finds_room_beside_what_is_reserved(holdings: Holdings) -> None:
    seq = sequence(range(9), more=3)
    assert holdings.growth(seq) == 3
    assert holdings.has_room(seq, (), reserved=3)
    assert not holdings.has_room(seq, (), reserved=4)


def test_without_a_prefix_cache_nothing_is_found(pool: PagePool) -> None:
    holdings, seq = Holdings(pool, prefix_cache=False), sequence(range(10))
    start(holdings, seq, 10)
    seq.num_computed = 10
    holdings.learn(seq)
    assert (holdings.match(sequence(range(10))), holdings.next_page(seq, ())) == ((), None)
