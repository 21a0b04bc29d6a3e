# SPDX-License-Identifier: Apache-2.0
"""A group of one has nothing to gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tetrarch.core.errors import Unsupported
from tetrarch.moe.dispatch.all_gather import AllGather
from tetrarch.moe.types import Routing


def test_alone_it_is_the_identity(make_spec: Any) -> None:
    dispatcher = AllGather(make_spec())
    hidden = torch.randn(3, 64)
    routing = Routing(torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
    arrived = dispatcher.dispatch(hidden, routing)
    assert arrived.hidden is hidden
    assert arrived.routing is routing
    assert arrived.block_scale is None
    assert dispatcher.combine(hidden) is hidden


def test_several_ranks_are_refused(make_spec: Any) -> None:
    with pytest.raises(Unsupported, match="over 4 ranks"):
        AllGather(make_spec(num_local_experts=1))
