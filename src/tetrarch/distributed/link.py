# SPDX-License-Identifier: Apache-2.0
"""What a backend does for a weight group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tetrarch.distributed.parcel import Broadcast

__all__ = ["Link"]


class Link(Protocol):
    """A rank's end of a group. After a failed broadcast it is of no use but to be closed."""

    @property
    def is_alive(self) -> bool:
        """Whether it can receive, as far as can be said without trying."""
        ...

    def receive(self, broadcasts: Sequence[Broadcast], timeout: float) -> list[Tensor]:
        """Receive broadcasts of rank 0.

        Args:
            broadcasts: In their order.
            timeout: Seconds for all of them.

        Returns:
            uint8 `[bytes]` for each.

        Raises:
            MemoryError: There is no room; nothing has begun, and the link is as before.
            RuntimeError: The trainer or the link died, or something else came.
            OSError: The same, or it took too long.
        """
        ...

    def close(self) -> None:
        """Leave the group, from any thread; a `receive` that waits fails. Once is enough."""
        ...
