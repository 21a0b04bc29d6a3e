# SPDX-License-Identifier: Apache-2.0
"""The values of a field that has only a few, for whoever sent another one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import inspect

__all__ = ["choices_at"]

_PATH = re.compile(r"`\$([^`]*)`$")
_STEP = re.compile(r"\.([^.\[]+)|(\[)")


def choices_at(kind: type, error: str) -> str:
    """Return in words what the place that an error names may hold.

    Args:
        kind: A msgspec struct.
        error: What msgspec said of a value that is none; it ends in a path: `$.mode`.

    Returns:
        `"abort", "in_place" or "retract"`; empty if any text or number may be there.
    """
    path = _PATH.search(error)
    if path is None:
        return ""
    steps = [name or bracket for name, bracket in _STEP.findall(path[1])]
    values = [
        msgspec.json.encode(value).decode() for value in _values(inspect.type_info(kind), steps)
    ]
    return " or ".join(filter(None, (", ".join(values[:-1]), *values[-1:])))


def _values(there: inspect.Type, steps: Sequence[str]) -> Iterator[object]:
    """Yield the literals behind `steps`; `null` is none of them: who needs it leaves keys out."""
    match there:
        case inspect.Metadata():
            yield from _values(there.type, steps)
        case inspect.UnionType():
            for one in there.types:
                yield from _values(one, steps)
        case inspect.StructType() if steps:
            for field in there.fields:
                if field.encode_name == steps[0]:
                    yield from _values(field.type, steps[1:])
        case inspect.ListType() if steps:
            yield from _values(there.item_type, steps[1:])
        case inspect.LiteralType() if not steps:
            yield from there.values
        case _:
            return
