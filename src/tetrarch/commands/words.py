# SPDX-License-Identifier: Apache-2.0
"""The words of each command, read before anything heavy is imported.

A wrong flag is reported in a fraction of a second, while importing torch and transformers takes
five. A command itself is given what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tetrarch.commands.arithmetic.problems import Split
from tetrarch.config.cli import LaunchParser, Reading, add_launch_arguments, read_command_line
from tetrarch.core.errors import ConfigError

__all__ = ["read"]

_TASKS = ("arithmetic",)
_EVALUATED = [str(split) for split in Split if split is not Split.TRAIN]
_NO_SERVER = ("server",)  # settings without a meaning where nothing is served: not in --help


def read(command: str, words: Sequence[str]) -> Reading:
    """Read what follows `tetrarch COMMAND`.

    Returns:
        What was understood. What was not is among its errors, and the resolver adds to them.

    Raises:
        LaunchErrors: The words make no command line, as where a flag lacks its value.
        SystemExit: Help was asked for, and is printed.
    """
    make, check = _COMMANDS[command]
    reading = read_command_line(make(), words)
    return replace(reading, errors=(*reading.errors, *check(reading)))


def _of_settings(command: str, description: str, *, hidden: Sequence[str] = ()) -> LaunchParser:
    """Return the parser of a command that takes nothing but settings."""
    parser = LaunchParser(prog=f"tetrarch {command}", description=description)
    add_launch_arguments(parser, hidden=hidden)
    return parser


def _serve() -> LaunchParser:
    return _of_settings("serve", "Answer over HTTP until stopped. Without MODEL: the demo model.")


def _explain() -> LaunchParser:
    return _of_settings("explain", "Print what would be served, and why, without loading weights.")


def _checksum() -> LaunchParser:
    return _of_settings(
        "checksum",
        "Load a checkpoint as a server of these settings would, and print the digests that its "
        "/weights_checker reports.",
        hidden=_NO_SERVER,
    )


def _generate() -> LaunchParser:
    parser = LaunchParser(
        prog="tetrarch generate",
        usage="%(prog)s [MODEL] --prompt TEXT [settings]",
        description="Print what a model says.",
    )
    own = parser.add_argument_group("what to generate")
    own.add_argument(
        "--prompt", action="append", help="repeat it for several; - reads standard input"
    )
    own.add_argument("--raw", action="store_true", help="the prompt is plain text, not a question")
    own.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    own.add_argument("--temperature", type=float, default=0.0, help="default 0: the likeliest")
    own.add_argument("--seed", type=int, default=None, help="fixes the draw above temperature 0")
    own.add_argument("--n", type=int, default=1, help="outputs for each prompt; default 1")
    own.add_argument("--json", action="store_true", help="one JSON object a line, with token ids")
    add_launch_arguments(parser, hidden=_NO_SERVER)
    return parser


def _eval() -> LaunchParser:
    parser = LaunchParser(
        prog="tetrarch eval",
        usage="%(prog)s arithmetic [MODEL] [settings]",
        description="Measure how well a model solves generated word problems: greedy accuracy, "
        "and answer NLL, the mean negative log-likelihood per token of the worked solution, end "
        "token included.",
    )
    parser.add_argument("task", nargs="?", help="what to solve: arithmetic")
    own = parser.add_argument_group("what to measure")
    own.add_argument(
        "--split",
        choices=_EVALUATED,
        default="test",
        help="default test: unseen questions; comp: unseen operations; hard: larger numbers",
    )
    own.add_argument("--limit", type=int, default=100, help="problems to ask; default 100")
    own.add_argument("--out", type=Path, help="also write the JSON here")
    add_launch_arguments(parser, hidden=_NO_SERVER)
    return parser


def _check_nothing(_: Reading) -> list[ConfigError]:
    return []


def _check_generate(reading: Reading) -> list[ConfigError]:
    if reading.namespace.prompt:
        return []
    return [ConfigError("no --prompt", why="there is nothing to say", fix='--prompt "Hello!"')]


def _check_eval(reading: Reading) -> list[ConfigError]:
    asked = reading.namespace
    errors: list[ConfigError] = []
    # Beside an unknown flag the first word may be that flag's value.
    if asked.task not in _TASKS and not reading.errors:
        what = f"unknown task {asked.task!r}" if asked.task else "no task"
        why = f"the word after eval says what to solve: {', '.join(_TASKS)}"
        errors.append(ConfigError(what, why=why, fix=f"tetrarch eval {_TASKS[0]} [MODEL]"))
    if asked.limit < 1:
        why = "at least one problem is needed"
        errors.append(ConfigError(f"--limit {asked.limit}", why=why, fix="--limit 100"))
    return errors


_COMMANDS: Mapping[
    str,
    tuple[Callable[[], LaunchParser], Callable[[Reading], list[ConfigError]]],
] = {
    "serve": (_serve, _check_nothing),
    "generate": (_generate, _check_generate),
    "explain": (_explain, _check_nothing),
    "checksum": (_checksum, _check_nothing),
    "eval": (_eval, _check_eval),
}
