# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tetrarch.distributed.meeting import Meeting
from tetrarch.distributed.rendezvous import connect, from_trainer, left


def test_ranks_that_do_not_come_are_waited_for_until_the_deadline(meeting: Meeting) -> None:
    limit = timedelta(seconds=20)
    store = dist.TCPStore(
        "127.0.0.1", meeting.port, 2, is_master=True, wait_for_workers=False, timeout=limit
    )
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        connect(meeting, began + 0.5)
    assert 0.4 < time.monotonic() - began < 10
    del store


def test_a_time_that_has_passed_is_a_millisecond_for_torch_takes_no_less() -> None:
    assert left(time.monotonic() - 5) == timedelta(milliseconds=1)
    assert 9 < left(time.monotonic() + 10).total_seconds() <= 10
    options = from_trainer(time.monotonic() + 10)
    assert (options.rootRank, options.rootTensor) == (0, 0)
    assert 9 < options.timeout.total_seconds() <= 10
