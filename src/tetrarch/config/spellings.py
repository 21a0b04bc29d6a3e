# SPDX-License-Identifier: Apache-2.0
"""Every name a setting answers to, and what is made of the names that were said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tetrarch.config.args import LaunchArgs
from tetrarch.core.errors import ConfigError, TetrarchError
from tetrarch.core.knob import ENV_PREFIX, KnobField, knobs, parse_switch

__all__ = ["FLAGS", "KEYWORDS", "VARIABLES", "Said", "Sayings", "Spelling", "nearest"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One name of a setting.

    Attributes:
        means: The value that the bare name stands for; `None` where it takes one.
    """

    name: str
    field: KnobField
    means: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """One setting, said once."""

    field: KnobField
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={self.field.show(self.value)}"


def _index(*, flags: bool) -> dict[str, Spelling]:
    index: dict[str, Spelling] = {}
    for field in knobs(LaunchArgs):
        own = field.flag if flags else field.env
        index[own] = Spelling(own, field)
        if flags and field.kind is bool:
            negated = own.replace("--", "--no-", 1)
            index[negated] = Spelling(negated, field, "off")
        for alias in field.knob.also:
            if alias.is_flag == flags:
                index[alias.name] = Spelling(alias.name, field, alias.means)
    return index


FLAGS: Mapping[str, Spelling] = _index(flags=True)
VARIABLES: Mapping[str, Spelling] = _index(flags=False)
KEYWORDS: Mapping[str, Spelling] = {
    name.removeprefix("--").replace("-", "_"): spelling for name, spelling in FLAGS.items()
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like `name`, as advice."""
    names = {_core(each): each for each in known}  # a shared prefix is no likeness
    found = difflib.get_close_matches(_core(name), list(names), n=1, cutoff=0.55)
    return f"did you mean {names[found[0]]}?" if found else "`tetrarch serve --help` lists them"


def _core(name: str) -> str:
    return name.removeprefix("--").removeprefix(ENV_PREFIX)


class Sayings:
    """Collects what was said, in whatever way, and everything that is wrong with it."""

    def __init__(self) -> None:
        self._said: list[Said] = []
        self.errors: list[TetrarchError] = []

    def flag(self, spelling: Spelling, text: str | None) -> None:
        """A flag was given, with its argument or, where it takes none, without."""
        if text is None:
            text = spelling.means or "on"
        self._parse(spelling, text)

    def environment(self, environ: Mapping[str, str]) -> None:
        """Variables are set; an empty one says nothing."""
        for name, text in environ.items():
            spelling = VARIABLES.get(name)
            if spelling is None:
                if name.startswith(ENV_PREFIX):
                    self._unknown("variable", name, VARIABLES)
            elif text and spelling.means is None:
                self._parse(spelling, text)
            elif text:
                self._switch(spelling, text)

    def keyword(self, name: str, value: object) -> None:
        """A keyword argument was passed, which carries a Python value."""
        spelling = KEYWORDS.get(name)
        if spelling is None:
            self._unknown("keyword", name, KEYWORDS)
        elif spelling.means is not None:
            self._switch(spelling, str(value))
        else:
            try:
                checked = spelling.field.check(value, spelling=name)
            except ConfigError as error:
                self.errors.append(error)
            else:
                self._said.append(Said(spelling.field, name, checked))

    def settle(self) -> LaunchArgs:
        """Return the settings; where two spellings disagree, the first one is kept.

        Both are sound: the disagreement is among `errors`.
        """
        kept: dict[str, Said] = {}
        for said in self._said:
            before = kept.setdefault(said.field.name, said)
            if before.value != said.value:
                self.errors.append(
                    ConfigError(
                        f"{before} and {said} disagree",
                        why=f"both set {said.field.name}",
                        fix="keep one of the two",
                    )
                )
        return LaunchArgs(**{name: said.value for name, said in kept.items()})

    def _parse(self, spelling: Spelling, text: str) -> None:
        try:
            value = spelling.field.parse(text, spelling=spelling.name)
        except ConfigError as error:
            self.errors.append(error)
        else:
            self._said.append(Said(spelling.field, spelling.name, value))

    def _switch(self, spelling: Spelling, text: str) -> None:
        try:
            is_on = parse_switch(text, spelling=spelling.name)
        except ConfigError as error:
            self.errors.append(error)
        else:
            if is_on:
                self._parse(spelling, spelling.means or "on")

    def _unknown(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.errors.append(
            ConfigError(
                f"unknown {kind} {name!r}",
                why="no setting has that name, and a setting that is not read would mislead",
                fix=nearest(name, known),
            )
        )
