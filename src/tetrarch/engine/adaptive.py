# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft."""

from __future__ import annotations

from tetrarch.config.plan import SpecPlan

__all__ = ["DraftLength", "DraftLengths"]


class DraftLength:
    """How many tokens one request has drafted."""

    def __init__(self, current: int) -> None:
        self.current = current

    def observe(self, *, proposed: int, accepted: int) -> None:
        """Learn from one verification."""


class DraftLengths:
    """Of all requests."""

    def __init__(self, spec: SpecPlan) -> None:
        self.current = spec.num_steps

    def start(self) -> DraftLength:
        """Return the length of a new request."""
        return DraftLength(self.current)
