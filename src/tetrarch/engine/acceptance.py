# SPDX-License-Identifier: Apache-2.0
"""How many drafts were right: exact counters from the first verification on."""

from __future__ import annotations

import msgspec

__all__ = ["Acceptance", "SpecStatus"]


class Acceptance(msgspec.Struct, kw_only=True):
    """What verifications of drafts have brought, for one request or for all.

    What lies behind the token that ends an output is not counted anywhere.

    Attributes:
        num_verifies: Steps in which drafts were verified.
        num_tokens: What these steps yielded: accepted drafts, and the target's own token after
            them. The token that a prompt yields, and steps without drafts, are left out.
        num_proposed: Drafts verified.
        num_accepted: Those that were what the target said.
        histogram: How many verifications accepted 0, 1, 2, … drafts.
    """

    num_verifies: int = 0
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    histogram: list[int] = []

    def add(self, *, proposed: int, accepted: int, tokens: int) -> None:
        """Count one verification."""
        self.num_verifies += 1
        self.num_tokens += tokens
        self.num_proposed += proposed
        self.num_accepted += accepted
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1

    def copy(self) -> Acceptance:
        """Return the counts as they are now."""
        return msgspec.structs.replace(self, histogram=list(self.histogram))

    @property
    def length(self) -> float:
        """Tokens that a verification yields on average; 0 before the first."""
        return self.num_tokens / max(self.num_verifies, 1)

    @property
    def rate(self) -> float:
        """Share of the drafts that were right; 0 before the first."""
        return self.num_accepted / max(self.num_proposed, 1)


class SpecStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How speculation goes, all requests together.

    Attributes:
        num_steps: Tokens that are drafted for a new request's step; changes where it adapts.
        lifetime: Since the start.
        since_flush: Since the prefix cache was emptied by a client.
    """

    num_steps: int
    lifetime: Acceptance
    since_flush: Acceptance
