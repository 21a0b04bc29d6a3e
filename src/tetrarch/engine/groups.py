# SPDX-License-Identifier: Apache-2.0
"""Process groups with trainers, by name; meeting and receiving go on beside the steps."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import torch

from tetrarch.core.errors import RequestError
from tetrarch.distributed.group import Meeting, WeightGroup
from tetrarch.engine.actions import DestroyGroup, InitGroup, UpdateFromDistributed
from tetrarch.engine.jobs import Then
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.replies import accepted
from tetrarch.engine.updates import Updates

__all__ = ["Groups"]

_JOIN_S = 300.0  # seconds; a trainer of many servers calls them one by one
_RECEIVE_S = 300.0  # seconds for the tensors of one call


class Groups:
    """The groups of one engine."""

    def __init__(self, updates: Updates, device: torch.device) -> None:
        """Begin.

        Args:
            updates: Takes what is received; runs one job at a time.
            device: Where nccl groups receive.
        """
        self._updates, self._device = updates, device
        self._groups: dict[str, WeightGroup] = {}

    def join(self, message: InitGroup) -> None:
        """Meet a trainer.

        Raises:
            RequestError: There is a group of that name, or another job.
        """
        name = message.group_name
        if name in self._groups and self._groups[name].is_open:
            raise RequestError(
                f"there is a weight group {name!r}",
                why="names tell groups apart",
                fix="POST /destroy_weights_update_group first, or choose another name",
                param="group_name",
            )
        what = f"weight group {name!r} is being joined"
        self._updates.start(message.ticket, what, partial(self._meet, message))

    def leave(self, message: DestroyGroup) -> ControlReply:
        """Leave a group.

        Raises:
            RequestError: There is none of that name.
        """
        self._group(message.group_name).close()
        del self._groups[message.group_name]
        return accepted(message.ticket, f"left weight group {message.group_name!r}")

    def receive(self, message: UpdateFromDistributed) -> None:
        """Receive the tensors of one call; then take them between two steps.

        Raises:
            RequestError: There is no such group, or another job.
        """
        work = partial(self._receive, self._group(message.group_name), message)
        self._updates.start(message.ticket, "tensors are being received", work)

    def _meet(self, message: InitGroup) -> Then:
        meeting = Meeting(
            address=message.master_address,
            port=message.master_port,
            rank=message.rank_offset,
            world_size=message.world_size,
            name=message.group_name,
            backend=message.backend,
        )
        group = WeightGroup.join(meeting, device=self._device, timeout=_JOIN_S)
        return partial(self._joined, message, group)

    def _joined(self, message: InitGroup, group: WeightGroup) -> ControlReply:
        self._groups[message.group_name] = group
        return accepted(message.ticket, f"joined weight group {message.group_name!r}")

    def _receive(self, group: WeightGroup, message: UpdateFromDistributed) -> Then:
        try:
            tensors = group.receive(
                message.names,
                message.dtypes,
                message.shapes,
                load_format=message.load_format,
                timeout=_RECEIVE_S,
            )
        except RequestError as error:
            if group.is_open:
                raise
            return partial(self._lost, message.group_name, group, error)
        return self._updates.received(message, tensors)

    def _lost(self, name: str, group: WeightGroup, error: RequestError) -> NoReturn:
        """Forget a group that is gone, and give its update up; then refuse the call."""
        if self._groups.get(name) is group:
            del self._groups[name]
        self._updates.give_up()
        raise error

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise RequestError(
                f"there is no weight group {name!r}",
                why=f"there are {', '.join(map(repr, self._groups)) or 'none'}",
                fix="POST /init_weights_update_group first",
                param="group_name",
            )
        return self._groups[name]
