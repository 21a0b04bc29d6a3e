# SPDX-License-Identifier: Apache-2.0
"""A knob: one setting with up to three spellings (keyword, flag, environment variable).

A knob is declared once, as the annotation of a `LaunchArgs` field. The command line, the
environment reader and the generated reference pages are all read off that declaration.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

__all__ = ["Knob", "KnobField", "knobs"]


@dataclass(frozen=True, slots=True)
class Knob:
    """What the outside world may call a field, and what it means.

    Attributes:
        help: One sentence, in the present tense.
        flag: The command-line spelling, or `None` where the field has none.
        env: The environment spelling, or `None`.
        also: Spellings of other engines that we honour (flags start with `-`).
        choices: The closed set of values, or `()`.
        unit: `tokens`, `bytes`, `s`, `ranks`; empty for a pure number or a name.
        group: Heading under which `--help` and the reference list it.
        secret: Never printed; masked in logs, `explain` and `/server_info`.
    """

    help: str
    flag: str | None = None
    env: str | None = None
    also: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    unit: str = ""
    group: str = "server"
    secret: bool = False


@dataclass(frozen=True, slots=True)
class KnobField:
    """A `Knob` together with the field that carries it."""

    name: str
    type: Any
    default: Any
    knob: Knob


def knobs(cls: type) -> tuple[KnobField, ...]:
    """Return the knobs of a dataclass in declaration order.

    Raises:
        TypeError: A field carries no `Knob`. A setting without a description does not exist.
    """
    hints = get_type_hints(cls, include_extras=True)
    return tuple(_knob_field(field, hints[field.name]) for field in fields(cls))


def _knob_field(field: Field[Any], hint: Any) -> KnobField:
    if get_origin(hint) is not Annotated or not isinstance(get_args(hint)[1], Knob):
        raise TypeError(f"{field.name}: every setting is declared as Annotated[type, Knob(...)]")
    default = None if field.default is MISSING else field.default
    return KnobField(field.name, get_args(hint)[0], default, get_args(hint)[1])
