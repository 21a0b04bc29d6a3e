# SPDX-License-Identifier: Apache-2.0
"""The command `tetrarch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tetrarch.core.errors import TetrarchError
from tetrarch.core.registry import Registry

__all__ = ["COMMANDS", "main"]

# Imported on use: `tetrarch --help` must not wait for torch.
COMMANDS = Registry(
    {
        "serve": "tetrarch.commands.serve:main",
        "generate": "tetrarch.commands.generate:main",
        "explain": "tetrarch.commands.explain:main",
        "eval": "tetrarch.commands.eval:main",
        "checksum": "tetrarch.commands.checksum:main",
    }
)
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
    """Run one command; return 0, 1 for an error that was explained, or 2 for a wrong command."""
    words = sys.argv[1:] if argv is None else list(argv)
    name = words[0] if words else ""
    if name in COMMANDS:
        return _run(name, words[1:])
    if name in ("-h", "--help", "help"):
        _print(_USAGE)
        return 0
    if name == "--version":
        _print(f"tetrarch {version('tetrarch')}")
        return 0
    _print(f"tetrarch: unknown command {name!r}\n\n{_USAGE}" if name else _USAGE, failed=True)
    return 2


def _run(name: str, words: Sequence[str]) -> int:
    try:
        status: int = COMMANDS[name](words)
        sys.stdout.flush()
    except TetrarchError as error:
        _print(str(error), failed=True)
        return 1
    except BrokenPipeError:  # `tetrarch explain | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return status


def _print(text: str, *, failed: bool = False) -> None:
    print(text, file=sys.stderr if failed else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
