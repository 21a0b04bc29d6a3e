# SPDX-License-Identifier: Apache-2.0
"""A knob: one setting with three spellings (keyword, flag, environment variable).

A knob is declared once, as the annotation of a `LaunchArgs` field. The field's name is the
keyword; flag and variable follow from it (`max_total_tokens`, `--max-total-tokens`,
`TETRARCH_MAX_TOTAL_TOKENS`). The command line, the environment reader and the generated reference
pages are all read off that declaration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from fractions import Fraction
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from tetrarch.core.errors import ConfigError

__all__ = ["ENV_PREFIX", "Alias", "Knob", "KnobField", "knobs", "parse_switch"]

ENV_PREFIX = "TETRARCH_"

_SWITCHES = {"1": True, "true": True, "yes": True, "on": True} | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for a setting, usually another engine's.

    Attributes:
        name: A flag (`--moe-a2a-backend`) or a variable (`SGLANG_…`).
        means: The value that the bare name stands for. Such a flag takes no argument; such a
            variable is a boolean that says nothing while it is off.
    """

    name: str
    means: str | None = None

    @property
    def is_flag(self) -> bool:
        """Whether the name belongs on a command line."""
        return self.name.startswith("-")


@dataclass(frozen=True, slots=True)
class Knob:
    """What a setting means, and what it may be.

    Attributes:
        help: What it does, in the present tense.
        also: Further names that we honour.
        choices: The closed set of values, or `()`.
        refused: Values that are understood too, so that the resolver can say why not.
        synonyms: Another engine's word for a value, in any case, and ours.
        unit: `tokens`, `bytes`, `requests`, `ranks`; empty for a pure number or a name.
        group: Heading under which `--help` and the reference list it.
        at_least: Smallest value allowed, or `None`.
        at_most: Largest value allowed, or `None`.
        secret: Never printed; masked in logs, `explain` and `/server_info`.
    """

    help: str
    also: tuple[Alias, ...] = ()
    choices: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()
    unit: str = ""
    group: str = "server"
    at_least: float | None = None
    at_most: float | None = None
    secret: bool = False


@dataclass(frozen=True, slots=True)
class KnobField:
    """A `Knob` together with the field that carries it."""

    name: str
    kind: type  # bool, int, float, str or tuple (of strings, comma-separated)
    optional: bool  # `None` stands for "auto"
    default: Any
    knob: Knob

    @property
    def flag(self) -> str:
        """The spelling on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The spelling in the environment."""
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str, *, spelling: str) -> Any:
        """Read a value from text.

        Args:
            text: What a flag or a variable carries.
            spelling: The name it was said under, for the error.

        Raises:
            ConfigError: The text is not a value of this setting.
        """
        words = {theirs.casefold(): ours for theirs, ours in self.knob.synonyms}
        text = words.get(text.casefold(), text)
        if self.optional and text == "auto":
            return None
        try:
            value = _PARSERS[self.kind](text)
        except (ValueError, KeyError, ZeroDivisionError):
            raise self._not_a_value(text, spelling) from None
        return self._within(value, spelling)

    def check(self, value: object, *, spelling: str) -> Any:
        """Accept a Python value, as a keyword argument carries it.

        Raises:
            ConfigError: The value has another type, or lies outside the bounds.
        """
        if value is None and self.optional:
            return None
        if isinstance(value, os.PathLike):
            value = os.fspath(cast("os.PathLike[str]", value))
        if isinstance(value, str) and self.kind in (str, tuple):
            return self.parse(str(value), spelling=spelling)
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return self._within(float(value), spelling)
        if self.kind is tuple and isinstance(value, (list, tuple)):
            items = cast("list[object]", list(value))
            if all(isinstance(item, str) for item in items):
                return self._within(tuple(items), spelling)
        if type(value) is not self.kind or self.kind is tuple:
            raise self._not_a_value(value, spelling)
        return self._within(value, spelling)

    def show(self, value: object) -> str:
        """Return a value as an operator would write it; secrets masked."""
        if value is None:
            return "auto" if self.kind is not str else "not set"
        if self.knob.secret:
            return "***"
        if isinstance(value, tuple):
            return ",".join(cast("tuple[str, ...]", value)) or "none"
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

    def _within(self, value: Any, spelling: str) -> Any:
        knob = self.knob
        if knob.choices and value not in (*knob.choices, *knob.refused):
            raise self._not_a_value(value, spelling)
        low, high = knob.at_least, knob.at_most
        if (low is not None and value < low) or (high is not None and value > high):
            raise self._not_a_value(value, spelling)
        return value

    def _not_a_value(self, value: object, spelling: str) -> ConfigError:
        said = "***" if self.knob.secret else repr(value)
        return ConfigError(
            f"{spelling}: {said} is not {self.expects}",
            why=f"it sets {self.name}: {self.knob.help.split('. ')[0].rstrip('.')}",
            fix=f"give {self.expects}, or leave it out for {self.show(self.default)}",
        )

    @property
    def expects(self) -> str:
        """What a value must be, in words."""
        knob = self.knob
        if knob.choices:
            ours = {choice.casefold() for choice in knob.choices}
            also = [
                f"{word} = {means}" for word, means in knob.synonyms if word.lower() not in ours
            ]
            words = "one of " + ", ".join(knob.choices)
            return f"{words} (also {', '.join(also)})" if also else words
        noun = _NOUNS[self.kind] + (f" of {knob.unit}" if knob.unit else "")
        low, high = knob.at_least, knob.at_most
        if low is not None and low == high:
            noun = f"{low:g}, the only value"
        elif low is not None and high is not None:
            noun += f" from {low:g} to {high:g}"
        elif low is not None:
            noun += f", at least {low:g}"
        return noun + (", or auto" if self.optional and self.kind is not str else "")


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError  # an unset `--api-key "$KEY"` must not mean no key
    return text


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: _SWITCHES[text.strip().lower()],
    int: int,
    float: lambda text: float(Fraction(text)),  # 0.5, 1e-3 and 1/2688
    str: _text,
    tuple: _items,
}
_NOUNS: dict[type, str] = {
    bool: "a boolean (1/0, true/false, yes/no, on/off)",
    int: "a whole number",
    float: "a number",
    str: "a non-empty text",
    tuple: "a comma-separated list",
}


def parse_switch(text: str, *, spelling: str) -> bool:
    """Read a boolean.

    Raises:
        ConfigError: The text is none.
    """
    try:
        return _SWITCHES[text.strip().lower()]
    except KeyError:
        raise ConfigError(
            f"{spelling}: {text!r} is not {_NOUNS[bool]}",
            why="it switches something on or off",
            fix="give 1 or 0, or unset it",
        ) from None


@cache
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
    if field.default is MISSING:
        raise TypeError(f"{field.name}: every setting has a default")
    kind, knob = get_args(hint)
    optional = get_origin(kind) is UnionType and NoneType in get_args(kind)
    if optional:
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    kind = get_origin(kind) or kind
    if kind not in _PARSERS:
        raise TypeError(f"{field.name}: a setting cannot be a {kind}")
    return KnobField(field.name, kind, optional, field.default, knob)
