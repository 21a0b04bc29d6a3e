# SPDX-License-Identifier: Apache-2.0
"""How a control message is answered when all went well, when it is refused, and when we fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tetrarch.core.errors import CheckpointError, RequestError, TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.core.units import format_bytes
from tetrarch.engine.messages import ControlReply
from tetrarch.executor.updates import Received, UpdateReport
from tetrarch.models.report import Unused

__all__ = [
    "END",
    "Act",
    "Say",
    "accepted",
    "answered",
    "busy",
    "failed_update",
    "left_out",
    "no_update",
    "other_update",
    "refused",
    "sentence",
    "taken",
    "update_facts",
    "update_summary",
]

_log = get_logger(__name__)
END = "POST /end_weight_update first"

Act = Callable[[], ControlReply | None]  # `None`: the answer comes later
Say = Callable[[Sequence[ControlReply]], None]


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


def busy(ticket: int, advice: str, facts: Mapping[str, Any]) -> ControlReply:
    """Refuse what requests are in the way of; `facts` are keys of the payload."""
    message = f"requests are running or waiting; {advice}"
    return ControlReply(
        ticket=ticket, ok=False, message=message, payload=dict(facts), status=400, code="busy"
    )


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
        # A log need not be UTF-8 either, but who collects it may insist.
        _log.error("a control message has met a defect\n%s", _text(traceback.format_exc()))
        text = _text(f"{type(error).__name__}: {error}")
        return ControlReply(
            ticket=ticket, ok=False, message=text, status=500, code="internal_error"
        )


def sentence(error: TetrarchError) -> str:
    """Return an error in one line."""
    why = "; ".join(line.strip() for line in error.why.splitlines())
    return _text(f"{error.what}: {why}; {error.fix}")


def failed_update() -> RequestError:
    """Refuse what belongs to an update that is over."""
    return RequestError(
        "this update has failed",
        why="one of its calls was refused, and it was taken back",
        fix="POST /end_weight_update, and begin again",
    )


def no_update() -> RequestError:
    """Refuse to end what is not there."""
    return RequestError(
        "no update by tensors is open",
        why="none has begun, or it has ended already",
        fix="POST /begin_weight_update before the first tensors",
    )


def other_update(what: str, *, fix: str = "wait for its reply") -> RequestError:
    """Refuse what must wait for `what`; `fix` ends that."""
    return RequestError(
        what,
        why="weights are updated by one update at a time",
        fix=fix,
    )


def taken(ticket: int, received: Received | None, **payload: Any) -> ControlReply:
    """Say what one call has brought to an update that goes on; `None`: nothing."""
    count = 0 if received is None else received.pieces.num_used
    warnings = [] if received is None else left_out(received.pieces.placements.unused)
    words = [f"took {count} tensors; the update goes on", *warnings]
    return accepted(ticket, "; ".join(words), warnings=warnings, **payload)


def update_summary(report: UpdateReport | None) -> str:
    """Return what an update did, in words."""
    if report is None:
        return "no update was open"
    size = format_bytes(report.num_bytes)
    source = "" if report.load is None else f" from {report.load.source}"
    words = f"updated {report.num_tensors} tensors, {size}, in {report.seconds:.2f} s{source}"
    return "; ".join([words, *left_out(report.unused)])


def update_facts(report: UpdateReport) -> dict[str, Any]:
    """Return what an update did, as keys of a payload."""
    return {
        "atomic": report.atomic,
        "seconds": report.seconds,
        "num_tensors": report.num_tensors,
        "num_bytes": report.num_bytes,
        "warnings": left_out(report.unused),
    }


def left_out(unused: Mapping[Unused, tuple[str, ...]]) -> list[str]:
    """Return in words which tensors an update, or a call of one, brought for nothing."""
    return [
        f"{_tensors_were(len(names))} left out ({kind}), such as {names[0]}"
        for kind, names in unused.items()
        if names
    ]


def _tensors_were(count: int) -> str:
    return "1 tensor was" if count == 1 else f"{count} tensors were"


def _text(message: str) -> str:
    """Return what msgpack can carry: names of files need not be Unicode."""
    return message.encode(errors="backslashreplace").decode()
