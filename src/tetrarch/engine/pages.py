# SPDX-License-Identifier: Apache-2.0
"""Which KV page belongs to whom, and which still hold the beginning of a known text.

A page is free, used (some sequence holds it) or cached (nobody holds it, but its contents are
known). Known pages form a radix tree with one page an edge: a page's key is its parent page and
its own tokens, so equal beginnings share pages.

Whoever holds a page holds all pages before it, and lets them go last page first. So among cached
pages a child is always older than its parent, and the oldest is always a leaf: evicting in that
order never strands a page.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PageKey", "PagePool"]

_ROOT = -1

PageKey = tuple[int, tuple[int, ...]]  # parent page, tokens


class PagePool:
    """Reference-counted pages with a prefix cache.

    `num_free + num_cached + num_used == num_pages`, always.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._known: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._cached: dict[int, None] = {}  # in the order of eviction

    @property
    def num_free(self) -> int:
        """Pages with nothing worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Known pages that nobody holds; they are evicted when pages run out."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `take` could give."""
        return len(self._free) + len(self._cached)

    def match(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return the known pages that hold the beginning of `tokens`; `hold` them before use.

        Args:
            tokens: The whole sequence.
            limit: The most tokens to match; whole pages only.
        """
        pages: list[int] = []
        parent = _ROOT
        for start in range(0, limit - self.page_size + 1, self.page_size):
            page = self._known.get(self._key(parent, tokens, start=start))
            if page is None:
                break
            pages.append(page)
            parent = page
        return tuple(pages)

    def next_key(self, tokens: Sequence[int], pages: Sequence[int]) -> PageKey:
        """Return what identifies the page of `tokens` that follows `pages`."""
        parent = pages[-1] if pages else _ROOT
        return self._key(parent, tokens, start=len(pages) * self.page_size)

    def num_cached_of(self, pages: Sequence[int]) -> int:
        """Return how many of `pages` nobody holds: holding them makes fewer available."""
        return sum(page in self._cached for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Become one more holder of known pages."""
        for page in pages:
            self._holders[page] += 1
            self._cached.pop(page, None)

    def take(self, count: int) -> tuple[int, ...]:
        """Hold `count` fresh pages, evicting the longest unused known ones if need be.

        Raises:
            ValueError: More than `num_available`.
        """
        if count > self.num_available:
            raise ValueError(f"{count} pages wanted, {self.num_available} available")
        while len(self._free) < count:
            self._evict()
        taken = tuple(self._free.pop() for _ in range(count))
        for page in taken:
            self._holders[page] = 1
        return taken

    def learn(self, tokens: Sequence[int], pages: Sequence[int], *, known: int) -> tuple[int, ...]:
        """Make the whole pages of a sequence known to others.

        Args:
            tokens: Tokens whose keys and values are in the pages.
            pages: The pages that the caller holds.
            known: How many of them an earlier call has made known already.

        Returns:
            `pages`, where a page that another sequence made known first is replaced by that
            one, and given back: the contents are the same.
        """
        shared = list(pages)
        for index in range(known, len(tokens) // self.page_size):
            parent = shared[index - 1] if index else _ROOT
            key = self._key(parent, tokens, start=index * self.page_size)
            mine, theirs = shared[index], self._known.get(key)
            if theirs is None:
                self._known[key], self._key_of[mine] = mine, key
            elif theirs != mine:
                self.hold((theirs,))
                self.release((mine,))
                shared[index] = theirs
        return tuple(shared)

    def release(self, pages: Sequence[int]) -> None:
        """Stop holding pages. Known ones stay cached, the others are free."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] > 0:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Make pages unknown that only the caller holds, and empty the cache: they may be bad."""
        self.clear()
        for page in pages:
            if self._holders[page] == 1 and page in self._key_of:
                del self._known[self._key_of.pop(page)]

    def clear(self) -> None:
        """Evict every cached page."""
        while self._cached:
            self._evict()

    def _key(self, parent: int, tokens: Sequence[int], *, start: int) -> PageKey:
        return parent, tuple(tokens[start : start + self.page_size])

    def _evict(self) -> None:
        page = next(iter(self._cached))
        del self._cached[page]
        del self._known[self._key_of.pop(page)]
        self._free.append(page)
