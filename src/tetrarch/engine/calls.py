# SPDX-License-Identifier: Apache-2.0
"""What the calls of one update by tensors add up to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tetrarch.engine.actions import Selector

__all__ = ["Calls"]


@dataclass
class Calls:
    """What the calls of one update by tensors have asked for.

    Attributes:
        is_explicit: Somebody began it, and only its end ends it.
        selector: Whose tensors it takes.
        version: The last one named.
        flush: Whether one of them did not want old keys and values to live on.
        last: When the last one was answered (monotonic seconds).
    """

    is_explicit: bool
    selector: Selector = "all"
    version: str | None = None
    flush: bool = False
    last: float = field(default_factory=time.monotonic)
