# SPDX-License-Identifier: Apache-2.0
"""Memory given back to the system, and taken again: by tag, as often as a client likes."""

from __future__ import annotations

from typing import Any

from tetrarch.core.errors import RequestError
from tetrarch.engine.actions import Release, Resume
from tetrarch.engine.engine import Engine
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.replies import accepted
from tetrarch.executor.regions import RegionChange, RegionState
from tetrarch.memory.slots import Region

__all__ = ["Occupation"]


class Occupation:
    """Moves the regions of an engine's rank, when no request is in the way."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def release(self, message: Release) -> ControlReply | None:
        """Give memory back; `None` while a request is in the way.

        Raises:
            ConfigError: This memory cannot be released or kept.
            MemoryRefused: There is no room to keep the weights.
            RequestError: There is no such tag.
        """
        rank, tags = self._engine.rank, _regions(message.tags)
        resident = [tag for tag in tags if rank.region_states[tag] is RegionState.RESIDENT]
        if resident and not self._engine.is_idle:
            return None
        if Region.KV_CACHE in resident:
            self._engine.flush()  # the pages that it knows will hold something else
        change = rank.release(tags, backup=message.backup)
        return self._reply(message.ticket, "released", change)

    def resume(self, message: Resume) -> ControlReply:
        """Take memory again.

        Raises:
            MemoryRefused: The weights that were kept cannot be read.
            RequestError: There is no such tag.
        """
        change = self._engine.rank.resume(_regions(message.tags))
        return self._reply(message.ticket, "resumed", change)

    def _reply(self, ticket: int, verb: str, change: RegionChange) -> ControlReply:
        moved = [tag.value for tag in change.num_bytes if tag not in change.already]
        payload: dict[str, Any] = {
            verb: moved,
            "already": [tag.value for tag in change.already],
            "num_bytes": {tag.value: size for tag, size in change.num_bytes.items()},
            "state": {tag.value: state for tag, state in self._engine.rank.region_states.items()},
        }
        return accepted(ticket, f"{verb}: {', '.join(moved) or 'nothing more'}", **payload)


def _regions(tags: tuple[str, ...]) -> tuple[Region, ...]:
    """Return the regions of a client's tags; all of them for none."""
    known = {region.value: region for region in Region}
    if unknown := [tag for tag in tags if tag not in known]:
        raise RequestError(
            f"there is no memory tag {', '.join(map(repr, unknown))}",
            why=f"the tags are {', '.join(known)}",
            fix="send some of them, or none for all",
            param="tags",
        )
    return tuple(region for tag, region in known.items() if not tags or tag in tags)
