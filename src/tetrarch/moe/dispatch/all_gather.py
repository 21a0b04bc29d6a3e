# SPDX-License-Identifier: Apache-2.0
"""Every rank sees every token and computes its own experts' share."""

from __future__ import annotations

from torch import Tensor

from tetrarch.core.errors import Unsupported
from tetrarch.moe.types import Dispatched, ExpertSpec, Routing

__all__ = ["AllGather"]


class AllGather:
    """Dispatch over a group of one, where gathering is the identity."""

    def __init__(self, spec: ExpertSpec) -> None:
        if spec.num_local_experts != spec.num_experts:
            raise Unsupported(
                f"all_gather over {spec.num_experts // spec.num_local_experts} ranks",
                why="expert parallelism is not built yet",
                fix="--ep-size 1",
            )

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Return the tokens as they are: (T, H)."""
        return Dispatched(hidden, None, routing)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sums as they are: (T, H)."""
        return rows
