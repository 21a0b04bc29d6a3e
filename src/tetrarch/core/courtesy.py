# SPDX-License-Identifier: Apache-2.0
"""Long work beside a loop that must go on: a guest has as much of the interpreter as the loop.

Python runs one thread at a time. A step gives the interpreter up at each of its hundreds of torch
calls, and beside a thread of pure Python it waits 5 ms each time to have it back: a step of 9 ms
took 2.8 s beside a pickle that was decoded. So a guest looks up now and then: when it has had its
share, and a turn of the loop has begun, it stands still until that one is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Courtesy", "gently"]

T = TypeVar("T")

_LEAST_S = 0.004  # a guest's share beside turns that are shorter


class Courtesy:
    """Between one thread that takes turns and the guests beside it."""

    def __init__(self) -> None:
        self._between = threading.Event()
        self._between.set()
        self._share_s = _LEAST_S

    @contextmanager
    def turn(self) -> Generator[None]:
        """Take a turn; guests that have had their share stand still until it is over."""
        began = time.thread_time()  # without what guests take of it
        self._between.clear()
        try:
            yield
        finally:
            self._share_s = max(_LEAST_S, time.thread_time() - began)
            self._between.set()

    @contextmanager
    def guest(self) -> Generator[None]:
        """Make this thread a guest: `gently` means something to it."""
        before, _here.guest = _here.guest, self
        try:
            yield
        finally:
            _here.guest = before

    def paced(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items, and look up between them."""
        began = time.perf_counter()
        for item in items:
            yield item
            if time.perf_counter() - began > self._share_s:
                self._between.wait()
                began = time.perf_counter()


class _Here(threading.local):
    guest: Courtesy | None = None


_here = _Here()


def gently(items: Iterable[T]) -> Iterable[T]:
    """Return the same items; a guest looks up between two of them."""
    return items if (courtesy := _here.guest) is None else courtesy.paced(items)
