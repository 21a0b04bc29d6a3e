# SPDX-License-Identifier: Apache-2.0
"""Every exception tetrarch raises: what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AddressChanged",
    "BudgetTooSmall",
    "CapacityExceeded",
    "CheckpointError",
    "ConfigError",
    "EngineDead",
    "LaunchErrors",
    "MemoryRefused",
    "RequestError",
    "ShapeError",
    "TetrarchError",
    "UnknownAttentionArgument",
    "Unsupported",
]


class TetrarchError(Exception):
    """Base of all our errors; printed as three lines: what, why, fix."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why  {why}\n  fix  {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(kind: type[TetrarchError], what: str, why: str, fix: str) -> TetrarchError:
    return kind(what, why=why, fix=fix)


class ConfigError(TetrarchError):
    """A setting is malformed, unknown, or contradicts another one."""


class Unsupported(ConfigError):
    """The combination asked for is not a row of the support table."""


class BudgetTooSmall(ConfigError):
    """A static buffer would not hold the largest forward this server can issue."""


class LaunchErrors(TetrarchError):
    """All errors of one launch, reported together."""

    def __init__(self, errors: Sequence[TetrarchError]) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        Exception.__init__(self, "\n".join(str(error) for error in self.errors))
        self.what = f"{count} problem{'s' if count != 1 else ''} with this launch"
        self.why = "; ".join(error.what for error in self.errors)
        self.fix = "; ".join(error.fix for error in self.errors)

    def __reduce__(self) -> tuple[object, ...]:
        return (LaunchErrors, (self.errors,))


class CheckpointError(TetrarchError):
    """A checkpoint is missing, damaged, incomplete, or of a format we refuse by name."""


class AddressChanged(TetrarchError):
    """A write would have moved a tensor that a CUDA graph has captured."""


class CapacityExceeded(TetrarchError):
    """A forward is larger than the buffers that were sized for the worst case."""


class MemoryRefused(TetrarchError):
    """The system cannot give, keep or restore that much memory; everything is as before."""


class ShapeError(TetrarchError, ValueError):
    """A tensor's shape or dtype cannot stand for what it is meant to be."""


class UnknownAttentionArgument(TetrarchError):
    """A model passes an attention argument that we would otherwise silently ignore."""


class RequestError(TetrarchError):
    """A client's request cannot be served; becomes HTTP 400.

    Attributes:
        param: Name of the offending field, or `None`.
    """

    def __init__(self, what: str, *, why: str, fix: str, param: str | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request, (self.what, self.why, self.fix, self.param))


def _rebuild_request(what: str, why: str, fix: str, param: str | None) -> RequestError:
    return RequestError(what, why=why, fix=fix, param=param)


class EngineDead(TetrarchError):
    """The engine process is gone; requests fail at once instead of hanging."""
