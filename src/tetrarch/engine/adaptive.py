# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft: fewer where few are right, and none where it does not pay.

Where each draft is right with probability a, a step with k of them yields 1 + a + … + aᵏ tokens.
It costs 1 + c · k plain steps: c for a pass of the draft and one more row for the target. The best
k follows from an estimate of a, which each request has for itself, and all requests share to begin
with.

While nothing is drafted the draft does not read along either, so that it costs nothing. Now and
then it is tried again. Its entries for what it has not read are missing then: of the demo model's
3.6 tokens a step 2.7 are left, which is enough to find out. Trials become rarer as they fail.

Text of which no draft is right runs at 0.97 or more of the speed without, over 200 tokens of one
request or 40 requests of 20, as tests/engine/test_adaptive.py simulates. To learn costs 2.8 plain
steps once: the first request of a cold engine, if it has 20 tokens only, runs at 0.88. Beginning
with one draft would make that 0.97, and the first short request of good drafts 6 to 9 % slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from tetrarch.config.plan import SpecPlan

__all__ = ["DraftLength", "DraftLengths", "best_length"]

_COST = 0.35
"""c, in plain steps. Demo model on one CPU core: 7.0 ms alone, 14.6 ms with three drafts."""

_PRIOR = 0.8  # of a, before anything is known
_CERTAINTY = 2.0  # how many drafts a new request's first estimate counts for
_MEMORY = 0.93  # what a verification leaves of the weight of those before it
_SHARED_MEMORY = 0.98  # the same for the estimate that all requests share
_TRIAL = 3  # verifications of one draft; at 0.35 each, one step
_PERIOD = 128  # tokens before the first trial, which costs 1 % of them
_LONGEST_PERIOD = 2048
_TRIED = 16  # of so many new requests one is tried where nobody drafts: its prompt is read along


def best_length(acceptance: float, most: int, *, cost: float = _COST) -> int:
    """Return the number of drafts, up to `most`, that yields the most tokens for its time.

    Args:
        acceptance: a, below 1.
        most: An upper bound.
        cost: c.
    """

    def speed(length: int) -> float:
        return (1 - acceptance ** (length + 1)) / (1 - acceptance) / (1 + cost * length)

    return max(range(most + 1), key=speed)


@dataclass(slots=True)
class _Estimate:
    """A share, of which old observations fade."""

    hits: float
    trials: float

    @property
    def share(self) -> float:
        return min(self.hits / self.trials, 0.99)

    def add(self, hits: int, trials: int, *, memory: float) -> None:
        self.hits = self.hits * memory + hits
        self.trials = self.trials * memory + trials


class DraftLengths:
    """What all requests of an engine have in common.

    Attributes:
        most: The longest.
    """

    def __init__(self, spec: SpecPlan) -> None:
        self.most = spec.num_steps
        self.adapts = spec.adaptive
        self.estimate = _Estimate(_PRIOR * _CERTAINTY, _CERTAINTY)
        self._num_idle = 0  # requests that began without drafts since the last that was tried

    @property
    def current(self) -> int:
        """What a new request begins with, unless it is a trial."""
        return best_length(self.estimate.share, self.most) if self.adapts else self.most

    def start(self) -> DraftLength:
        """Return the length of a new request."""
        length = DraftLength(self)
        if length.current == 0:
            self._num_idle += 1
            if self._num_idle == _TRIED:
                self._num_idle = 0
                length.begin_trial()
        return length


class DraftLength:
    """How many tokens one request has drafted.

    Attributes:
        current: Tokens to draft for the next step; 0: the draft is to do nothing.
    """

    def __init__(self, shared: DraftLengths) -> None:
        self._shared = shared
        self.current = shared.current
        self._estimate = _Estimate(shared.estimate.share * _CERTAINTY, _CERTAINTY)
        self._trial = 0  # verifications left of one
        self._period = self._idle = _PERIOD

    def begin_trial(self) -> None:
        """Draft single tokens for a few steps, whatever is believed."""
        self.current, self._trial = 1, _TRIAL
        self._estimate = _Estimate(0.5, 1.0)

    def observe(self, *, proposed: int, accepted: int) -> None:
        """Learn from a step that has generated.

        Args:
            proposed: Drafts verified; 0 for a plain step.
            accepted: Those of them that were right.
        """
        if not self._shared.adapts:
            return
        if proposed == 0:
            self._wait()
            return
        judged = min(accepted + 1, proposed)  # nobody knows about those behind a wrong one
        self._estimate.add(accepted, judged, memory=_MEMORY)
        self._shared.estimate.add(accepted, judged, memory=_SHARED_MEMORY)
        if self._trial > 1:
            self._trial -= 1
            return
        was_trial, self._trial = self._trial == 1, 0
        self.current = best_length(self._estimate.share, self._shared.most)
        if self.current == 0:
            self._period = min(self._period * 2, _LONGEST_PERIOD) if was_trial else _PERIOD
            self._idle = self._period

    def _wait(self) -> None:
        if self.current > 0:
            return
        self._idle -= 1
        if self._idle <= 0:
            self.begin_trial()
