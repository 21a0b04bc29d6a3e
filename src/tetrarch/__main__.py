# SPDX-License-Identifier: Apache-2.0
"""The command `tetrarch`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from tetrarch.core.errors import LaunchErrors, TetrarchError
from tetrarch.core.registry import Registry

__all__ = ["COMMANDS", "main"]

# Imported on use: `tetrarch --help` must not wait for torch.
COMMANDS = Registry(
    {
        "serve": "tetrarch.commands.serve:run",
        "generate": "tetrarch.commands.generate:run",
        "explain": "tetrarch.commands.explain:run",
        "eval": "tetrarch.commands.eval:run",
        "checksum": "tetrarch.commands.checksum:run",
    }
)
_LATER = Registry({"read": "tetrarch.commands.words:read", "version": "importlib.metadata:version"})
_INTERRUPT = signal.default_int_handler
_INTERRUPTED, _BY_CTRL_C = "tetrarch: interrupted", 128 + signal.SIGINT
_USAGE = """usage: tetrarch COMMAND ...

Serve mixture-of-experts language models whose experts are NVFP4.

commands:
  serve [MODEL]             answer over HTTP; without MODEL the demo model that ships with tetrarch
  generate --prompt TEXT    print what a model says
  explain [MODEL]           print what would be served and why, without loading weights
  checksum [MODEL]          print a checkpoint's digests, to compare with a running server's
  eval arithmetic           measure accuracy and answer NLL on generated word problems

`tetrarch COMMAND --help` lists a command's settings. `tetrarch --version` prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words; by default those this program was started with. Then it also answers to
            Ctrl-C at any moment.

    Returns:
        0; 1 for an error that was explained; 2 for a wrong command; 130 where Ctrl-C ended it.
    """
    if argv is not None:
        return _run(argv)
    # An import that is interrupted may turn that into an error of its own, and nothing needs a
    # clean-up yet.
    signal.signal(signal.SIGINT, _leave)
    try:
        return _run(sys.argv[1:], on_imported=lambda: signal.signal(signal.SIGINT, _INTERRUPT))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; Python still tidies up


def _run(words: Sequence[str], *, on_imported: Callable[[], object] = lambda: None) -> int:
    name = words[0] if words else ""
    if name in COMMANDS:
        return _run_command(name, words[1:], on_imported)
    if name in ("-h", "--help", "help"):
        _print(_USAGE)
        return 0
    if name == "--version":
        _print(f"tetrarch {_LATER['version']('tetrarch')}")
        return 0
    _print(_wrong(name) if name else _USAGE, failed=True)
    return 2


def _run_command(name: str, words: Sequence[str], on_imported: Callable[[], object]) -> int:
    told: Sequence[TetrarchError] = ()
    try:
        reading = _LATER["read"](name, words)
        told = _tell(reading.errors)  # at once; the rest needs the model, and its imports
        if told and reading.is_silent:
            return 1
        command = COMMANDS[name]
        on_imported()
        status: int = command(reading)
        sys.stdout.flush()
    except LaunchErrors as error:
        _tell([each for each in error.errors if each not in told])
        return 1
    except TetrarchError as error:
        _tell([error])
        return 1
    except BrokenPipeError:  # `tetrarch explain | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _print(_INTERRUPTED, failed=True)
        return _BY_CTRL_C
    return status


def _tell(errors: Sequence[TetrarchError]) -> Sequence[TetrarchError]:
    for error in errors:
        _print(str(error), failed=True)
    return errors


def _leave(*_: object) -> None:
    _print(_INTERRUPTED, failed=True)
    os._exit(_BY_CTRL_C)


def _wrong(name: str) -> str:
    near = get_close_matches(name, COMMANDS, n=1)
    advice = f"; did you mean `tetrarch {near[0]}`?" if near else ""
    return f"tetrarch: unknown command {name!r}{advice}\n\n{_USAGE}"


def _print(text: str, *, failed: bool = False) -> None:
    print(text, file=sys.stderr if failed else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
