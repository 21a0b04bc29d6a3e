# SPDX-License-Identifier: Apache-2.0
"""The command line, and the only place where the environment is read.

Both are built from the knobs of `LaunchArgs`. A flag or keyword and a variable for the same
setting must agree; a malformed or unknown one is an error that says what was probably meant.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from tetrarch.config.args import GROUPS, LaunchArgs
from tetrarch.config.spellings import FLAGS, VARIABLES, Sayings, Spelling, nearest
from tetrarch.core.errors import ConfigError, LaunchErrors, TetrarchError
from tetrarch.core.knob import KnobField, knobs
from tetrarch.core.log import get_logger

__all__ = [
    "LaunchParser",
    "Reading",
    "add_launch_arguments",
    "from_keywords",
    "parse_args",
    "read_command_line",
    "read_keywords",
]

_SAID = "_said"  # where flags pile up in the namespace
_OTHERS = "SGLANG_"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The settings that were understood, and what was wrong with the rest.

    Attributes:
        args: Sound settings; one that was not understood is left at its default.
        errors: To be raised together with what the resolver finds.
        namespace: The command's own arguments.
    """

    args: LaunchArgs
    errors: tuple[TetrarchError, ...]
    namespace: argparse.Namespace

    @property
    def is_silent(self) -> bool:
        """Whether it leaves every setting at its default, so that a resolver can find no fault."""
        return self.args == LaunchArgs()


class LaunchParser(argparse.ArgumentParser):
    """An argument parser whose errors are ours, so that they are reported with all others."""

    def __init__(self, *, usage: str = "%(prog)s [MODEL] [settings]", **keywords: Any) -> None:
        super().__init__(usage=usage, allow_abbrev=False, formatter_class=_Lines, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigError(message, why="the command line cannot be read", fix="see --help")


class _Lines(argparse.HelpFormatter):
    """Keeps the line breaks of a help text."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        wrapped = (super(_Lines, self)._split_lines(line, width) for line in text.splitlines())
        return [line for lines in wrapped for line in lines]


def add_launch_arguments(parser: argparse.ArgumentParser, *, hidden: Collection[str] = ()) -> None:
    """Give a parser MODEL and every setting, under the headings of `GROUPS`.

    Args:
        parser: Of one command.
        hidden: Groups that the command's help leaves out.
    """
    by_group: dict[str, list[KnobField]] = {name: [] for name in GROUPS}
    for field in knobs(LaunchArgs):
        by_group[field.knob.group].append(field)
    for name, fields in by_group.items():
        is_hidden = name in hidden
        group = parser if is_hidden else parser.add_argument_group(name, GROUPS[name])
        for field in fields:
            if field.name == "model":
                group.add_argument(
                    "MODEL",
                    action=_Flag,
                    spelling=FLAGS[field.flag],
                    nargs="?",
                    default=argparse.SUPPRESS,
                    help=_help(field),
                )
            _add_field(group, field, is_shown=field.name != "model" and not is_hidden)


def _add_field(
    group: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    field: KnobField,
    *,
    is_shown: bool,
) -> None:
    spellings = [spelling for spelling in FLAGS.values() if spelling.field is field]
    for spelling in spellings:
        is_own = spelling.name == field.flag
        takes_none = spelling.means is not None or field.kind is bool
        group.add_argument(
            spelling.name,
            action=_Flag,
            spelling=spelling,
            dest=_SAID,
            nargs=0 if takes_none else None,
            default=argparse.SUPPRESS,
            metavar=None if takes_none else _metavar(field),
            help=_help(field) if is_own and is_shown else argparse.SUPPRESS,
        )


class _Flag(argparse.Action):
    """Write down that a flag was given, uninterpreted."""

    def __init__(self, *, spelling: Spelling, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.spelling = spelling

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser
        text = None if self.nargs == 0 else values
        is_word = option_string is None
        vars(namespace).setdefault(_SAID, []).append((self.spelling, text, is_word))


def _metavar(field: KnobField) -> str:
    if field.knob.choices:
        return "NAME"
    return field.knob.unit.upper() or {int: "N", float: "X", tuple: "LIST"}.get(field.kind, "TEXT")


def _help(field: KnobField) -> str:
    choices = field.knob.choices
    names = [name for name, spelling in FLAGS.items() if spelling.field is field]
    also = [name for name in names if name != field.flag and (field.default or "--no-" not in name)]
    notes = [
        f"one of {', '.join(choices)}" if choices else "",
        f"also {', '.join(also)}" if also else "",
        f"default {field.show(field.default)}" if field.default is not None else "",
    ]
    note = "; ".join(filter(None, notes))
    return f"{field.knob.help}\n[{note}]".replace("%", "%%") if note else field.knob.help


def read_command_line(
    parser: LaunchParser, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> Reading:
    """Read a command line and the environment.

    Args:
        parser: Holds the command's own arguments; `add_launch_arguments` was called on it.
        argv: The words after the command.
        environ: The environment; the process's own by default.

    Raises:
        LaunchErrors: The words make no command line, as where a flag lacks its value. All else
            that is wrong is returned, not raised, so that the resolver can add to it.
    """
    sayings = Sayings()
    try:
        namespace, rest = parser.parse_known_args(argv)
    except ConfigError as error:
        raise LaunchErrors([error]) from None
    # What follows an unknown flag is probably its value, not MODEL: name the flag alone.
    strangers = [word for word in rest if word.startswith("-")] or rest
    values = {value for word, value in pairwise(argv) if word in strangers}
    for spelling, text, is_word in vars(namespace).pop(_SAID, ()):
        if not (is_word and text in values):
            sayings.flag(spelling, text)
    sayings.errors += [_unknown_word(word, parser) for word in strangers]
    return _finish(sayings, environ, namespace)


def read_keywords(
    keywords: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> Reading:
    """Read keyword arguments and the environment, for the offline door."""
    sayings = Sayings()
    for name, value in keywords.items():
        sayings.keyword(name, value)
    return _finish(sayings, environ, argparse.Namespace())


def parse_args(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> LaunchArgs:
    """Return the settings of a command line that holds nothing else.

    Raises:
        LaunchErrors: Everything that could not be understood.
    """
    parser = LaunchParser(add_help=False)
    add_launch_arguments(parser)
    return _strict(read_command_line(parser, argv, environ))


def from_keywords(*, environ: Mapping[str, str] | None = None, **keywords: object) -> LaunchArgs:
    """Return the settings that keyword arguments and the environment make.

    Raises:
        LaunchErrors: Everything that could not be understood.
    """
    return _strict(read_keywords(keywords, environ))


def _strict(reading: Reading) -> LaunchArgs:
    if reading.errors:
        raise LaunchErrors(reading.errors)
    return reading.args


def _finish(
    sayings: Sayings, environ: Mapping[str, str] | None, namespace: argparse.Namespace
) -> Reading:
    environ = os.environ if environ is None else environ
    sayings.environment(environ)
    others = sorted(n for n in environ if n.startswith(_OTHERS) and n not in VARIABLES)
    if others:
        _log.warning("variables of SGLang that tetrarch does not read: %s", ", ".join(others))
    args = sayings.settle()
    return Reading(args=args, errors=tuple(sayings.errors), namespace=namespace)


def _unknown_word(word: str, parser: argparse.ArgumentParser) -> ConfigError:
    name = word.partition("=")[0]
    known = [*FLAGS, *(flag for action in parser._actions for flag in action.option_strings)]  # pyright: ignore[reportPrivateUsage]
    return ConfigError(
        f"unknown argument {name!r}",
        why="no setting has that name" if name.startswith("-") else "one MODEL is all it takes",
        fix=nearest(name, known) if name.startswith("-") else "leave it out",
    )
