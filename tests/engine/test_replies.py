# SPDX-License-Identifier: Apache-2.0
"""Every way in which a control message ends is an answer."""

from __future__ import annotations

import pytest

from tetrarch.core.errors import (
    CheckpointError,
    ConfigError,
    MemoryRefused,
    RequestError,
    TetrarchError,
)
from tetrarch.engine.messages import ControlReply, decode_outbound, encode
from tetrarch.engine.replies import accepted, answered


def answer(error: BaseException, code: str = "") -> ControlReply:
    def act() -> ControlReply:
        raise error

    reply = answered(7, act, code=lambda: code)
    assert reply is not None
    assert decode_outbound(encode([reply])) == [reply]
    return reply


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (RequestError, "invalid_request"),
        (CheckpointError, "invalid_weights"),
        (ConfigError, "refused"),
        (MemoryRefused, "refused"),
    ],
)
def test_our_errors_are_refusals(kind: type[TetrarchError], code: str) -> None:
    error = kind("what", why="why", fix="fix")
    expected = ControlReply(ticket=7, ok=False, message="what: why; fix", status=400, code=code)
    assert answer(error) == expected
    assert answer(error, "weights_inconsistent").code == "weights_inconsistent"


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), OSError(28, "no space")])
def test_other_errors_are_defects_and_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    reply = answer(error, "weights_inconsistent")
    assert (reply.ok, reply.status, reply.code) == (False, 500, "internal_error")
    assert type(error).__name__ in reply.message
    assert "Traceback" in caplog.text


def test_an_interrupt_is_no_answer() -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(KeyboardInterrupt())


def test_an_answer_may_come_later() -> None:
    assert answered(7, lambda: None, code=str) is None


def test_names_of_files_that_are_not_unicode_are_spelt_out() -> None:
    assert answer(ValueError("\udcff")).message == "ValueError: \\udcff"
    assert accepted(1, "\udcff", values=[1.5]).message == "\\udcff"
