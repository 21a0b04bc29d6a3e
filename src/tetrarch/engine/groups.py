# SPDX-License-Identifier: Apache-2.0
"""Process groups with trainers, by name; meeting and receiving go on beside the steps."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import torch

from tetrarch.core.errors import RequestError, TetrarchError
from tetrarch.distributed.broadcast import announced
from tetrarch.distributed.group import Meeting, WeightGroup
from tetrarch.engine.actions import DestroyGroup, InitGroup, UpdateFromDistributed
from tetrarch.engine.jobs import OneJob, Then
from tetrarch.engine.messages import ControlReply
from tetrarch.engine.replies import accepted
from tetrarch.engine.updates import Updates

__all__ = ["Groups"]

_JOIN_S = 300.0  # seconds; a trainer of many servers calls them one by one; `leave` ends it
_RECEIVE_S = 300.0  # seconds for the tensors of one call


class Groups:
    """The groups of one engine."""

    def __init__(self, updates: Updates, jobs: OneJob, device: torch.device) -> None:
        """Begin.

        Args:
            updates: Takes what is received.
            jobs: Where meeting and receiving take their turn.
            device: Where nccl groups receive.
        """
        self._updates, self._jobs, self._device = updates, jobs, device
        self._groups: dict[str, WeightGroup] = {}

    def join(self, message: InitGroup) -> None:
        """Meet a trainer.

        Raises:
            RequestError: There is a group of that name, another job, or the meeting cannot be.
        """
        name = message.group_name
        if name in self._groups and self._groups[name].is_open:
            raise RequestError(
                f"there is a weight group {name!r}",
                why="names tell groups apart",
                fix="POST /destroy_weights_update_group first, or choose another name",
                param="group_name",
            )
        meeting = Meeting(
            address=message.master_address,
            port=message.master_port,
            rank=message.rank_offset,
            world_size=message.world_size,
            name=name,
            backend=message.backend,
        )
        group = WeightGroup(meeting, self._device)
        what = f"weight group {name!r} is being joined"
        self._jobs.start(message.ticket, what, partial(self._meet, message, group))
        self._groups[name] = group

    def leave(self, message: DestroyGroup) -> ControlReply:
        """Leave a group; one that is being joined, too: who waits for that is refused.

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
        self._jobs.start(message.ticket, "tensors are being received", work)

    def _meet(self, message: InitGroup, group: WeightGroup) -> Then:
        try:
            group.join(_JOIN_S)
        except RequestError as error:
            return partial(self._forget, group, error)
        return partial(self._joined, message, group)

    def _joined(self, message: InitGroup, group: WeightGroup) -> ControlReply:
        if not group.is_open:
            why = "it was destroyed as soon as it was joined"
            self._forget(group, group.meeting.error(why, fix="POST it again"))
        return accepted(message.ticket, f"joined weight group {message.group_name!r}")

    def _receive(self, group: WeightGroup, message: UpdateFromDistributed) -> Then:
        try:
            shown = announced(message.names, message.dtypes, message.shapes)
            self._updates.foresee(message, shown)
        except TetrarchError as error:
            return self._unheard(group, error)
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
                return self._unheard(group, error)
            return partial(self._lost, group, error)
        return self._updates.received(message, tensors)

    def _unheard(self, group: WeightGroup, error: TetrarchError) -> Then:
        """Close a group whose broadcast nobody here takes: the next call would get its bytes."""
        group.close()
        why = (
            f"{error.why}; nothing was received, and weight group {group.meeting.name!r} is closed"
        )
        fix = f"{error.fix}; POST /init_weights_update_group before the next broadcast"
        return partial(self._forget, group, type(error)(error.what, why=why, fix=fix))

    def _lost(self, group: WeightGroup, error: RequestError) -> NoReturn:
        """Give the update of a group up that is gone; then forget it, and refuse the call."""
        self._updates.give_up()
        self._forget(group, error)

    def _forget(self, group: WeightGroup, error: TetrarchError) -> NoReturn:
        """Free a group's name, unless another has it already; then refuse the call."""
        if self._groups.get(group.meeting.name) is group:
            del self._groups[group.meeting.name]
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
