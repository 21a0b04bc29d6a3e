# SPDX-License-Identifier: Apache-2.0
"""Looking at the weights of a running engine: values by name, checksums, comparisons."""

from __future__ import annotations

import torch

from tetrarch.config.drafts import DRAFT
from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import CheckWeights, GetWeights, Selector
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.replies import accepted
from tetrarch.executor.weights import WeightStore
from tetrarch.memory.checksum import combine

__all__ = ["Inspection"]

_SHOWN = 10  # names in a message


def _is_of(selector: Selector, name: str) -> bool:
    """Whether a name of ours is of the draft's weights, or of the target's."""
    return selector == "all" or (selector == "draft") is name.startswith(DRAFT)


class Inspection:
    """Reads the weights; remembers one snapshot of their checksums."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._snapshot: dict[str, str] | None = None

    def read(self, message: GetWeights) -> ControlReply:
        """Return a weight's first rows, as floats.

        Raises:
            ConfigError: The weights are released.
            RequestError: There is no such weight.
        """
        value = self._store.value(message.name).detach()
        rows = value if value.dim() == 0 else value[: max(0, message.truncate_size)]
        values = rows.to("cpu", torch.float32).tolist()
        return accepted(message.ticket, message.name, values=values)

    def check(self, message: CheckWeights) -> ControlReply:
        """Take checksums, compare them, or write noise.

        Raises:
            ConfigError: The weights are released.
            RequestError: There is nothing to compare with.
        """
        if message.action == "reset_tensors":
            self._store.scramble()
            return accepted(message.ticket, "all weights are noise; a full update must follow")
        found = self._store.checksums()
        if message.action == "snapshot":
            self._snapshot = found
        found = {name: told for name, told in found.items() if _is_of(message.selector, name)}
        if message.action == "compare":
            return self._compare(message, found)
        text = f"{len(found)} tensors"
        return accepted(message.ticket, text, checksum=combine(found), checksums=found)

    def _compare(self, message: CheckWeights, found: dict[str, str]) -> ControlReply:
        if self._snapshot is None:
            raise RequestError(
                "there is no snapshot to compare with",
                why="none was taken since the server started",
                fix='send the action "snapshot" first',
                param="action",
            )
        skipped = frozenset(message.skip)
        differing = [n for n in found if found[n] != self._snapshot[n] and n not in skipped]
        if not differing:
            return accepted(message.ticket, "all weights are as in the snapshot", differing=[])
        text = f"{len(differing)} tensors differ, such as {', '.join(differing[:_SHOWN])}"
        return ControlReply(
            ticket=message.ticket,
            ok=False,
            message=text,
            payload={"differing": differing},
            status=400,
            code="weights_differ",
        )
