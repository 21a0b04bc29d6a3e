# SPDX-License-Identifier: Apache-2.0
"""Everything that is wrong with a checkpoint, collected and told at once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tetrarch.core.errors import CheckpointError

__all__ = ["Fault", "Faults", "listed"]

_SHOWN = 10  # names of each kind; a whole missing layer must not fill the screen


class Fault(StrEnum):
    """A way in which a checkpoint does not fit the model."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    MISMATCHED = "mismatched"
    HALF_PAIRED = "half-paired"
    HALF_COMPLETE = "half-complete"
    NOT_SENT = "not sent"
    LEFT_OUT = "left out, and nothing else was sent"
    REFUSED = "refused"
    WRONG_TYPE = "of a wrong type"
    TWICE = "given twice"


_FIX = {
    Fault.MISSING: "complete the download: every tensor of the model must be there",
    Fault.UNEXPECTED: "use the config.json that belongs to these weights",
    Fault.MISMATCHED: "use the config.json that belongs to these weights",
    Fault.HALF_PAIRED: "export the checkpoint again, with every weight and all of its scales",
    Fault.HALF_COMPLETE: "send the tensors that are missing, and end the update after them",
    Fault.NOT_SENT: "send every tensor of the model: what it holds now is good for nothing",
    Fault.LEFT_OUT: "send tensors that this server holds and the call's selector takes; a draft's "
    "under --speculative-algorithm",
    Fault.REFUSED: "convert these weights to BF16, FP16, FP32, FP8 (E4M3, per tensor or 128x128) "
    "or NVFP4",
    Fault.WRONG_TYPE: "store plain weights as BF16, FP16 or FP32",
    Fault.TWICE: "keep one of the two",
}
_FIX_SENT = {
    Fault.UNEXPECTED: "send weights of the served model, under their names in its checkpoint",
    Fault.MISMATCHED: "send every weight in the shape that the served model has",
    Fault.HALF_PAIRED: "send every weight with all of its scales",
    Fault.WRONG_TYPE: "send plain weights as BF16, FP16 or FP32",
    Fault.TWICE: "send one of the two",
}


class Faults:
    """A list of faults under construction."""

    def __init__(self, *, sent: bool = False) -> None:
        """Begin; `sent`: of tensors that came one by one, not of a folder."""
        self._is_sent = sent
        self._found: dict[Fault, list[str]] = {}

    def add(self, fault: Fault, words: str) -> None:
        """Note one; `words` begin with the tensor's name."""
        self._found.setdefault(fault, []).append(words)

    def raise_any(self, source: str) -> None:
        """Raise if there are any.

        Raises:
            CheckpointError: Counts of every kind, and the first ten of each by name.
        """
        if not self._found:
            return
        fixes = {**_FIX, **(_FIX_SENT if self._is_sent else {})}
        kinds = [fault for fault in Fault if fault in self._found]
        counts = ", ".join(f"{len(self._found[kind])} {kind}" for kind in kinds)
        raise CheckpointError(
            f"{source} does not fit the model: {counts}",
            why="\n       ".join(self._told(kind, alone=len(kinds) == 1) for kind in kinds),
            fix="; ".join(dict.fromkeys(fixes[kind] for kind in kinds)),
        )

    def _told(self, kind: Fault, *, alone: bool) -> str:
        names = listed(self._found[kind])
        return names if alone else f"{kind}: {names}"


def listed(words: Sequence[str]) -> str:
    """Return the first ten of them in one line, and how many more there are."""
    more = len(words) - _SHOWN
    return "; ".join(words[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
