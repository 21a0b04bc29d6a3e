# SPDX-License-Identifier: Apache-2.0
"""Regular expressions that end an output.

A client writes them, so neither compiling nor searching one may take long: `regex` searches with
a time limit, which `re` lacks, and what it would unroll is bounded before it compiles.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import regex

__all__ = ["MAX_MATCH", "PatternStops", "defect"]

MAX_MATCH = 256
"""Characters that a match may span; text that could begin one is held back so long."""

_CONTEXT = 64  # characters before a match that look-behinds and anchors see
_MAX_UNROLLED = 4096  # atoms, each 100-200 bytes once compiled
_BURST_S, _SUSTAINED_S = 0.1, 0.001  # CPU time of an output: at once, and for each token
_LEAST_S = 1e-6  # a limit of 0 or less is none
_REPEAT = re.compile(r"(.?)\{(\d+)", re.DOTALL)


def defect(pattern: str) -> str:
    """Return why a pattern is refused; empty if it is not."""
    try:
        re.compile(pattern)  # the dialect: `regex` itself takes more, such as recursion
        if _unrolled(pattern) > _MAX_UNROLLED:
            return f"its repetitions unroll to more than {_MAX_UNROLLED} parts"
        matches_nothing = regex.compile(pattern).search("") is not None
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    return "it matches the empty text, which is everywhere" if matches_nothing else ""


def _unrolled(pattern: str) -> int:
    """Bound the parts that `regex` makes of `x{m}` and `(…){m}`, which it writes out m times."""
    size, times = len(pattern), 1
    for before, digits in _REPEAT.findall(pattern):
        count = int(digits[:9])
        if before in ")}" or before.isspace():  # a group, or what verbose mode put after one
            times *= max(count, 1)
        else:
            size += count
    return size * times


class PatternStops:
    """Finds patterns in growing text, which is searched whenever some was added.

    A match begins where the client has not read yet, so that it can be cut off.

    Attributes:
        held: Characters at the end of the text that may begin a match.
        too_slow: A pattern that took too long; nothing is searched any more.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [regex.compile(pattern) for pattern in patterns]
        self._text = ""  # the end of it
        self._start = 0  # where in it a match may begin
        self._left_s = _BURST_S
        self.held = 0
        self.too_slow: str | None = None

    def push(self, text: str, *, armed: bool) -> tuple[int, int, str] | None:
        """Take new text, and return what matches first.

        Args:
            text: Follows all earlier text.
            armed: Whether a match counts; one that begins in `text` else never does.

        Returns:
            Characters after the match, characters after its start, and the pattern.
        """
        if not (self._patterns and text) or self.too_slow is not None:
            return None
        self._text += text
        self.held, hit = 0, None
        if armed:
            self._left_s = min(self._left_s + _SUSTAINED_S, _BURST_S)
            hit = min(filter(None, map(self._find, self._patterns)), default=None, key=_end_first)
        self._start = len(self._text) - min(self.held, MAX_MATCH)
        cut = max(0, self._start - _CONTEXT)
        self._text, self._start = self._text[cut:], self._start - cut
        self.held = len(self._text) - self._start
        return hit

    def _find(self, pattern: regex.Pattern[str]) -> tuple[int, int, str] | None:
        size = len(self._text)
        if (match := self._search(pattern, partial=False)) is not None:
            return size - match.end(), size - match.start(), pattern.pattern
        if (match := self._search(pattern, partial=True)) is not None:
            self.held = max(self.held, size - match.start())
        return None

    def _search(self, pattern: regex.Pattern[str], *, partial: bool) -> regex.Match[str] | None:
        """Search on the output's time: CPU time of this thread, for others may hold the core."""
        if self.too_slow is not None:
            return None
        began = time.thread_time()
        try:
            return pattern.search(
                self._text, self._start, partial=partial, timeout=max(self._left_s, _LEAST_S)
            )
        except TimeoutError:
            self.too_slow = pattern.pattern
            return None
        finally:
            self._left_s -= time.thread_time() - began


def _end_first(hit: tuple[int, int, str]) -> tuple[int, int]:
    after, since_start, _ = hit
    return -after, -since_start
