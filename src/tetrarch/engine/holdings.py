# SPDX-License-Identifier: Apache-2.0
"""The pages of each sequence: found in the cache, taken as it grows, given back, made known.

Pages are counted for what has been launched, and made known for what has landed.
"""

from __future__ import annotations

from tetrarch.core.units import ceil_div
from tetrarch.engine.pages import PageKey, PagePool
from tetrarch.engine.sequence import Sequence

__all__ = ["Holdings"]

_HEADROOM = 64
"""Output tokens for which a newcomer must find pages, for itself and for each running request.
Fewer admit more requests, and set them back more often: with 64 requests of 1300 tokens over
pages for 6, 64 takes a quarter fewer steps than 512, and computes a third more tokens."""


class Holdings:
    """What sequences hold of one page pool."""

    def __init__(self, pool: PagePool, *, prefix_cache: bool) -> None:
        self._pool, self._prefix_cache = pool, prefix_cache

    def match(self, seq: Sequence) -> tuple[int, ...]:
        """Return the cached pages that hold the beginning of a sequence."""
        return self._pool.match(seq.tokens, seq.match_limit) if self._prefix_cache else ()

    def next_page(self, seq: Sequence, pages: tuple[int, ...]) -> PageKey | None:
        """Identify the page after `pages`; `None` where the cache may not give it to `seq`."""
        end = (len(pages) + 1) * self._pool.page_size
        if not self._prefix_cache or end > seq.match_limit:
            return None
        return self._pool.next_key(seq.tokens, pages)

    def knows_prompt(self, seq: Sequence) -> bool:
        """Whether the whole pages of a running prompt are known."""
        return (seq.known + 1) * self._pool.page_size > seq.num_prompt

    def has_room(self, seq: Sequence, matched: tuple[int, ...], *, reserved: int) -> bool:
        """Whether a newcomer will find its pages, beside those reserved for who runs."""
        need = self.growth(seq) - len(matched) + reserved
        return need <= self._pool.num_available - self._pool.num_cached_of(matched)

    def growth(self, seq: Sequence) -> int:
        """Pages that a sequence will soon want beyond those it has."""
        soon = min(seq.size + _HEADROOM, seq.limit)
        return seq.pages_for(soon, page_size=self._pool.page_size)

    def num_fitting(self, seq: Sequence) -> int:
        """How many more tokens of a sequence the available pages hold."""
        pages = len(seq.pages) + self._pool.num_available
        return pages * self._pool.page_size - seq.num_launched

    def suffice(self, decodes: list[Sequence]) -> bool:
        """Whether there are pages for one more token of each."""
        size = self._pool.page_size
        need = sum(seq.pages_for(seq.num_launched + 1, page_size=size) for seq in decodes)
        return need <= self._pool.num_available

    def begin(self, seq: Sequence, matched: tuple[int, ...]) -> None:
        """Let a sequence start behind the pages that were found."""
        self._pool.hold(matched)
        seq.pages, seq.known = matched, len(matched)
        seq.num_launched = seq.num_computed = len(matched) * self._pool.page_size

    def extend(self, seq: Sequence, count: int) -> bool:
        """Give a sequence the pages for its next `count` tokens, if there are any."""
        need = seq.pages_for(seq.num_launched + count, page_size=self._pool.page_size)
        if need == 0:
            return True
        if need > self._pool.num_available:
            return False
        seq.pages += self._pool.take(need)
        return True

    def reserve_drafts(self, seq: Sequence, count: int) -> int:
        """Find pages for drafts to verify and for drafts to make; return how many to verify.

        The draft's own entries go one token less far than what it proposes. The executor proposes
        as many as the pages hold.
        """
        size, end = self._pool.page_size, seq.num_launched + count
        if seq.length is None or end < len(seq.tokens):
            return 0
        useful = seq.num_useful
        ahead = useful + max(seq.num_wanted - 1, 0)
        missing = seq.pages_for(min(end + ahead, seq.limit), page_size=size)
        seq.pages += self._pool.take(min(missing, self._pool.num_available))
        return min(useful, len(seq.pages) * size - end)

    def trim(self, seq: Sequence) -> None:
        """Give back the pages behind what is computed."""
        used = ceil_div(seq.num_launched, self._pool.page_size)
        if used < len(seq.pages):
            self._pool.release(seq.pages[used:])
            seq.pages = seq.pages[:used]

    def learn(self, seq: Sequence) -> None:
        """Make the whole pages of a sequence known, as far as they are computed."""
        if self._prefix_cache:
            computed = seq.tokens[: seq.num_computed]
            seq.pages = self._pool.learn(computed, seq.pages, known=seq.known)
            seq.known = len(computed) // self._pool.page_size

    def spoil(self, seq: Sequence) -> None:
        """Make the pages of a sequence unknown, and nothing of it computed: they may be bad."""
        self._pool.forget(seq.pages)
        seq.num_computed = seq.known = 0
