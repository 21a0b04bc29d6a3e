# SPDX-License-Identifier: Apache-2.0
"""How a control message is answered when all went well, when it is refused, and when we fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tetrarch.core.errors import CheckpointError, RequestError, TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.engine.messages import ControlReply

__all__ = ["Act", "accepted", "answered", "refused", "sentence"]

_log = get_logger(__name__)

Act = Callable[[], ControlReply | None]  # `None`: the answer comes later


def accepted(ticket: int, message: str = "", **payload: Any) -> ControlReply:
    """Say that it is done."""
    return ControlReply(ticket=ticket, ok=True, message=_text(message), payload=payload)


def refused(ticket: int, error: TetrarchError, *, code: str = "") -> ControlReply:
    """Say why it is not done: 400, with a code by the error's class unless one is given."""
    if not code:
        is_theirs = isinstance(error, RequestError)
        code = "invalid_request" if is_theirs else "refused"
        code = "invalid_weights" if isinstance(error, CheckpointError) else code
    return ControlReply(ticket=ticket, ok=False, message=sentence(error), status=400, code=code)


def answered(ticket: int, act: Act, *, code: Callable[[], str]) -> ControlReply | None:
    """Act, and turn whatever it raises into an answer: a client cannot end the engine.

    Args:
        ticket: Of the message.
        act: What it asks for.
        code: Called if that is refused.
    """
    try:
        return act()
    except TetrarchError as error:
        return refused(ticket, error, code=code())
    except Exception as error:
        _log.exception("a control message has met a defect")
        text = _text(f"{type(error).__name__}: {error}")
        return ControlReply(
            ticket=ticket, ok=False, message=text, status=500, code="internal_error"
        )


def sentence(error: TetrarchError) -> str:
    """Return an error in one line."""
    return _text(f"{error.what}: {error.why}; {error.fix}")


def _text(message: str) -> str:
    """Return what msgpack can carry: names of files need not be Unicode."""
    return message.encode(errors="backslashreplace").decode()
