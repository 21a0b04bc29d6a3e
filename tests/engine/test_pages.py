# SPDX-License-Identifier: Apache-2.0
"""Pages: exact accounts, sharing by contents, eviction from the leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tetrarch.engine.pages import PagePool

SIZE = 4


def cache(pool: PagePool, tokens: list[int]) -> tuple[int, ...]:
    """Compute `tokens`, make them known, let them go."""
    pages = pool.learn(tokens, pool.take(len(tokens) // SIZE), known=0)
    pool.release(pages)
    return pages


def test_a_known_beginning_is_matched_in_whole_pages() -> None:
    pool = PagePool(8, SIZE)
    pages = cache(pool, list(range(12)))
    assert pool.match(list(range(12)), 12) == pages
    assert pool.match(list(range(12)), 11) == pages[:2]
    assert pool.match([*range(8), 9, 9, 9, 9], 12) == pages[:2]
    assert pool.match([9, *range(11)], 12) == ()


def test_equal_tokens_under_another_parent_are_another_page() -> None:
    pool = PagePool(8, SIZE)
    first = cache(pool, [1] * 4 + [7] * 4)
    second = cache(pool, [2] * 4 + [7] * 4)
    assert not set(first) & set(second)
    assert pool.match([2] * 4 + [7] * 4, 8) == second


def test_the_longest_unused_leaf_is_evicted_first() -> None:
    pool = PagePool(4, SIZE)
    old = cache(pool, [1] * 8)
    new = cache(pool, [2] * 8)
    pool.hold(pool.match([1] * 8, 8))  # touch
    pool.release(old)
    (taken,) = pool.take(1)
    assert taken == new[1], "the deeper page of the less recently used branch"
    assert pool.match([2] * 8, 8) == new[:1]
    assert pool.match([1] * 8, 8) == old


def test_a_page_computed_twice_is_kept_once() -> None:
    pool = PagePool(8, SIZE)
    mine, theirs = pool.take(2), pool.take(2)
    known = pool.learn([1] * 8, mine, known=0)
    shared = pool.learn([1] * 4 + [2] * 4, theirs, known=0)
    assert known == mine
    assert shared == (mine[0], theirs[1])
    assert pool.num_used == 3
    pool.release(known)
    assert (pool.num_used, pool.num_cached) == (2, 1)
    pool.release(shared)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 3, 5)


def test_more_than_is_available_is_refused() -> None:
    pool = PagePool(2, SIZE)
    pool.take(1)
    with pytest.raises(ValueError, match="2 pages wanted, 1 available"):
        pool.take(2)


def test_forgotten_pages_are_matched_by_nobody() -> None:
    pool = PagePool(8, SIZE)
    cache(pool, [5] * 4)
    pages = pool.learn([1] * 8, pool.take(2), known=0)
    pool.forget(pages)
    pool.release(pages)
    assert pool.match([1] * 8, 8) == ()
    assert pool.num_free == 8


@dataclass
class Held:
    tokens: list[int]
    pages: tuple[int, ...]
    known: int


def check(pool: PagePool, held: list[Held], contents: dict[int, tuple[int, ...]]) -> None:
    used = {page for one in held for page in one.pages}
    assert pool.num_used == len(used)
    assert pool.num_free + pool.num_cached + pool.num_used == pool.num_pages
    for one in held:
        for index, page in enumerate(one.pages):
            mine = tuple(one.tokens[index * SIZE : (index + 1) * SIZE])
            assert contents[page][: len(mine)] == mine, "a held page was overwritten"


@pytest.mark.parametrize("seed", range(20))
def test_accounts_stay_exact_and_contents_true_under_random_work(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(rng.choice([5, 12, 40]), SIZE)
    held: list[Held] = []
    contents: dict[int, tuple[int, ...]] = {}
    for _ in range(400):
        roll = rng.random()
        if roll < 0.5:
            admit(pool, held, contents, rng)
        elif roll < 0.7 and held:
            one = rng.choice(held)
            one.pages = pool.learn(one.tokens, one.pages, known=one.known)
            one.known = len(one.tokens) // SIZE
        elif roll < 0.95 and held:
            pool.release(held.pop(rng.randrange(len(held))).pages)
        elif roll < 0.97:
            pool.clear()
            assert pool.num_cached == 0
        elif held:
            one = rng.choice(held)
            pool.forget(one.pages)
            one.known = 0  # what nobody else held is unknown again
        check(pool, held, contents)
    for one in held:
        pool.release(one.pages)
    pool.clear()
    assert pool.num_free == pool.num_pages


def admit(
    pool: PagePool, held: list[Held], contents: dict[int, tuple[int, ...]], rng: random.Random
) -> None:
    tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
    pages = pool.match(tokens, len(tokens) - 1)
    for index, page in enumerate(pages):
        assert contents[page] == tuple(tokens[index * SIZE : (index + 1) * SIZE])
    need = -(-len(tokens) // SIZE) - len(pages)
    if need > pool.num_available - pool.num_cached_of(pages):
        return
    pool.hold(pages)
    fresh = pool.take(need)
    for index, page in enumerate(fresh, start=len(pages)):
        contents[page] = tuple(tokens[index * SIZE : (index + 1) * SIZE])
    held.append(Held(tokens, pages + fresh, len(pages)))
