# SPDX-License-Identifier: Apache-2.0
"""The text of an output while it grows, and where it stops.

A token is not a character: it may be part of one, or a space that a decoder drops at the start
of a text. So outputs are decoded together with a few tokens before them, and what could still
change is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from tetrarch.engine.patterns import PatternStops
from tetrarch.engine.request import FinishReason, SamplingParams
from tetrarch.engine.text import Tokenizer

__all__ = ["OutputText", "StopMatcher", "TextStream"]

_INCOMPLETE = "\ufffd"  # what decoders put for bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes, hence tokens, of one UTF-8 character


class TextStream:
    """Text of a growing list of tokens; never splits a character.

    The pieces together equal the text decoded at once.
    """

    _CONTEXT = 6  # tokens decoded again with new ones
    _WINDOW = 18  # tokens after which the window is cut back to `_CONTEXT`
    _LONGEST = 64  # at most, however broken the bytes

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._sampling = tokenizer, sampling
        self._window = list(prompt_ids[-self._CONTEXT :])
        self._shown = len(self._decode(self._window))  # characters of the window's text
        self._pending = 0  # tokens since the text last ended with a whole character

    def push(self, token_id: int) -> str:
        """Take the next token, return the text that is now certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_INCOMPLETE))
        self._pending = self._pending + 1 if broken else 0
        # Byte-fallback decoders show every byte of an unfinished character as U+FFFD. After four
        # tokens the bytes are no character, and only the last one may begin another.
        held = broken if self._pending < _LONGEST_CHARACTER else 1
        piece = text[self._shown : len(text) - held]
        self._shown += len(piece)
        if len(self._window) > self._WINDOW:
            self._cut(held)
        return piece

    def flush(self) -> str:
        """Return what was held back; nothing follows it."""
        return self._decode(self._window)[self._shown :]

    def _cut(self, held: int) -> None:
        """Forget old tokens, where that cannot change how later ones decode."""
        kept = self._window[-self._CONTEXT :]
        text = self._decode(kept)
        whole = bool(text) and not text.startswith(_INCOMPLETE) and held == 0
        if whole or len(self._window) > self._LONGEST:
            self._window, self._shown = kept, len(text) - held

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._sampling.skip_special_tokens,
            spaces_between_special_tokens=self._sampling.spaces_between_special_tokens,
        )


class StopMatcher:
    """Find the first stop string or pattern in growing text; hold back what may become one.

    The first is the one whose end comes first, so that the answer does not depend on how the
    text is cut into pieces. Patterns are looked for whenever a piece has come.

    Attributes:
        matched: The stop string or pattern that was found; nothing is shown after it.
    """

    def __init__(
        self, stop: Sequence[str], patterns: Sequence[str] = (), *, keep: bool = False
    ) -> None:
        """`keep` shows the stop string itself, or what a pattern matched."""
        self._stop, self._keep = tuple(stop), keep
        self._patterns = PatternStops(patterns)
        self._held = ""
        self.matched: str | None = None

    @property
    def too_slow(self) -> str | None:
        """A pattern that took too long to look for; none is any more."""
        return self._patterns.too_slow

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take new text, return what may be shown.

        Args:
            text: Follows all earlier text.
            armed: Whether a stop string that ends in `text` counts.
        """
        if self.matched is not None:
            return ""
        before = len(self._held)
        scope = self._held + text
        hits = self._strings(scope, before) if armed else []
        if (found := self._patterns.push(text, armed=armed)) is not None:
            after, since_start, pattern = found
            hits.append((len(scope) - after, len(scope) - since_start, pattern))
        if hits:
            end, start, self.matched = min(hits)
            self._held = ""
            return scope[: end if self._keep else start]
        shown = len(scope) - max(self._partial(scope), self._patterns.held)
        self._held = scope[shown:]
        return scope[:shown]

    def flush(self) -> str:
        """Return what was held back; it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _strings(self, scope: str, before: int) -> list[tuple[int, int, str]]:
        hits: list[tuple[int, int, str]] = []
        for stop in self._stop:
            start = scope.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        return hits

    def _partial(self, scope: str) -> int:
        """Length of the longest end of `scope` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(scope)), longest, -1):
                if scope.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class OutputText:
    """What a client may see of an output: decoded, cut where it stops, end token left out.

    The engine uses it to find stop strings and patterns, the doors to make text; both see the same.

        text = OutputText(tokenizer, request.sampling, request.prompt_ids)
        shown = text.push(delta.token_ids, delta.finish)   # "" while nothing is certain
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._stream = TextStream(tokenizer, sampling, prompt_ids)
        self._stops = StopMatcher(sampling.stop, sampling.stop_regex, keep=sampling.no_stop_trim)
        self._sampling = sampling
        self._count = 0

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that ended the text."""
        return self._stops.matched

    @property
    def too_slow(self) -> str | None:
        """A pattern that took too long to look for."""
        return self._stops.too_slow

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Take the tokens of a delta, return the new text; `finish` releases what was held."""
        ended_by_id = finish is not None and isinstance(finish.matched, int)
        trimmed = 1 if ended_by_id and not self._sampling.no_stop_trim else 0
        pieces: list[str] = []
        for token_id in token_ids[: len(token_ids) - trimmed]:
            self._count += 1
            armed = self._count >= self._sampling.min_new_tokens
            pieces.append(self._stops.push(self._stream.push(token_id), armed=armed))
        if finish is not None and self.matched is None:
            pieces += [self._stops.flush(), self._stream.flush()]
        return "".join(pieces)
