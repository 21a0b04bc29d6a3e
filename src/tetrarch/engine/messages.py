# SPDX-License-Identifier: Apache-2.0
"""What crosses the border between a door and the engine process, as msgpack.

Inward: `Inbound`, in order; what trainers send is in `engine/actions.py`. Outward: `Outbound`.
Every control message carries a `ticket` that its `ControlReply` repeats.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tetrarch.core import errors
from tetrarch.core.errors import LaunchErrors, TetrarchError
from tetrarch.engine.acceptance import SpecStatus
from tetrarch.engine.actions import Action
from tetrarch.engine.request import Delta, GenerateRequest

__all__ = [
    "INBOUND",
    "OUTBOUND",
    "Abort",
    "ControlReply",
    "Flush",
    "Heartbeat",
    "Inbound",
    "LoadProgress",
    "Outbound",
    "Ready",
    "Shutdown",
    "Snapshot",
    "StartFailed",
    "decode_inbound",
    "decode_outbound",
    "encode",
]

INBOUND, OUTBOUND = "in", "out"  # sockets in the folder that both processes know


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End requests by exact id, by prefix if asked, or all of them.

    Attributes:
        ticket: 0 asks for no reply; else the reply's payload is `{"aborted": count}`.
        quiet: The client is gone: free the pages, send no delta.
    """

    ticket: int = 0
    rid: str = ""
    prefix: bool = False
    everything: bool = False
    quiet: bool = False


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Empty the prefix cache; fails while requests run unless they end within `timeout` seconds."""

    ticket: int
    timeout: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the engine's counters (`Heartbeat` fields and more)."""

    ticket: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Finish: abort everything and exit."""


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a control message; ticket 0 answers none: an update has ended by itself.

    Attributes:
        status: As HTTP has it: 200 if `ok`; 400 refused, 500 a defect, 503 not now.
        code: Name of what is wrong, such as `weights_inconsistent`; empty if `ok`.
    """

    ticket: int
    ok: bool
    message: str = ""
    payload: dict[str, Any] = {}
    status: int = 200
    code: str = ""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights are loaded, the KV pool is allocated, a smoke forward has run."""

    payload: dict[str, Any]  # capacity, load report, memory, versions


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine could not start: the error's class (in `core.errors`) and its three lines."""

    kind: str
    what: str
    why: str
    fix: str

    @classmethod
    def of(cls, error: TetrarchError) -> StartFailed:
        """Describe an error for the other process."""
        return cls(kind=type(error).__name__, what=error.what, why=error.why, fix=error.fix)

    def error(self) -> TetrarchError:
        """Return the error, of its own class where that takes three lines."""
        kind = _ERRORS.get(self.kind, TetrarchError)
        return kind(self.what, why=self.why, fix=self.fix)


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far the start has come; sent a few times a second, and when `finished`."""

    label: str
    total: int
    unit: str
    done: int
    finished: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent every second, and when a step or a control message has changed what it says.

    Attributes:
        at: When (monotonic seconds). Two threads send, and an older one may arrive later.
        state: `ready`, or why generation gets a 503: `weights_inconsistent`, `weights_released`,
            `weights_not_loaded` or `kv_released`.
        is_updating: An update by tensors is open, so nothing runs.
        updating_s: For how many seconds it has been.
        num_paused: Requests that a pause keeps from running.
        spec: How speculation goes; `None` without.
    """

    num_running: int
    num_waiting: int
    num_used_tokens: int
    num_cached_tokens: int  # evictable, held by the prefix cache
    max_total_tokens: int
    counters: dict[str, float]  # monotonic totals, by metric name
    at: float = 0.0
    weight_version: str = "default"
    model_path: str = ""
    state: str = "ready"
    is_paused: bool = False
    is_updating: bool = False
    updating_s: float = 0.0
    num_paused: int = 0
    spec: SpecStatus | None = None


Inbound = GenerateRequest | Abort | Flush | Snapshot | Shutdown | Action
Outbound = Delta | ControlReply | Ready | StartFailed | LoadProgress | Heartbeat

_ERRORS: dict[str, type[TetrarchError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TetrarchError) and kind is not LaunchErrors
}

_encoder = msgspec.msgpack.Encoder()
_inbound: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(Inbound)
_outbound: msgspec.msgpack.Decoder[list[Outbound]] = msgspec.msgpack.Decoder(list[Outbound])


def encode(message: Inbound | list[Outbound]) -> bytes:
    """Encode one inbound message, or one batch of outbound ones."""
    return _encoder.encode(message)


def decode_inbound(data: bytes) -> Inbound:
    """Decode what a door sent."""
    return _inbound.decode(data)


def decode_outbound(data: bytes) -> list[Outbound]:
    """Decode one batch that the engine sent."""
    return _outbound.decode(data)
