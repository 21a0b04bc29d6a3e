# SPDX-License-Identifier: Apache-2.0
"""The process that receives: it ends alone, and with whoever started it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

from tetrarch.core.errors import RequestError

if TYPE_CHECKING:
    from conftest import Joined

Gone = Callable[[psutil.Process], bool]


def test_it_is_killed_while_it_waits(join: Callable[[str], Joined], gone: Gone) -> None:
    joined = join("waits")
    threading.Timer(0.5, joined.receiver.kill).start()
    began = time.monotonic()
    with pytest.raises(RequestError, match="has ended: code -9"):
        joined.receive(("uint8", [4]))
    assert time.monotonic() - began < 5
    assert not joined.group.is_open
    assert gone(joined.receiver)


def test_it_is_killed_while_nothing_happens(join: Callable[[str], Joined], gone: Gone) -> None:
    joined = join("idle")
    joined.receiver.kill()
    assert gone(joined.receiver)
    deadline = time.monotonic() + 5
    while joined.group.is_open:  # as soon as its last thread has ended
        assert time.monotonic() < deadline
    with pytest.raises(RequestError, match="closed"):
        joined.receive(("uint8", [4]))


def test_closing_ends_it_and_a_call_that_waits_for_it(
    join: Callable[[str], Joined], gone: Gone
) -> None:
    joined = join("closed")
    threading.Timer(0.5, joined.group.close).start()
    with pytest.raises(RequestError, match="destroyed while it was receiving"):
        joined.receive(("uint8", [4]))
    assert gone(joined.receiver)


def test_more_than_the_machine_holds_is_refused_beforehand(weights: Joined) -> None:
    size = psutil.virtual_memory().total + 1
    with pytest.raises(RequestError, match="there is no room") as error:
        weights.receive(("uint8", [size]))
    assert error.value.param == "shapes"
    assert weights.group.is_open
