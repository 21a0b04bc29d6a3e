# SPDX-License-Identifier: Apache-2.0
"""What a command was told: understood or refused before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tetrarch.__main__ import COMMANDS
from tetrarch.commands.words import read
from tetrarch.config.args import GROUPS, LaunchArgs
from tetrarch.core.knob import knobs

SERVER_ONLY = [field.flag for field in knobs(LaunchArgs) if field.knob.group == "server"]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        read(command, ["--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_needs_torch_to_be_understood(command: str) -> None:
    """Nor to be refused: torch and transformers take seconds to import."""
    probe = (
        "import sys\nfrom tetrarch.__main__ import main\n"
        "assert main([sys.argv[1], '--nope']) in (1, 2)\n"
        "print(sorted({'torch', 'transformers', 'uvicorn', 'zmq'} & set(sys.modules)))"
    )
    # OMP_NUM_THREADS is a setting, and beside a setting the resolver has a say.
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", probe, command],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    assert ran.stdout == "[]\n"
    assert "unknown argument '--nope'" in ran.stderr


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_help_shows_no_setting_of_a_server_where_there_is_none(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(command, capsys)
    assert not [flag for flag in SERVER_ONLY if f"  {flag}" in shown]
    assert GROUPS["server"] not in shown
    assert "--quantization" in shown
    assert read(command, ["--port", "1234"]).args.port == 1234  # understood all the same


@pytest.mark.parametrize("command", ["serve", "explain"])
def test_help_shows_every_setting_of_a_server(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(command, capsys)
    assert all(f"  {flag}" in shown for flag in SERVER_ONLY)


def test_the_usage_of_eval_can_be_typed_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: tetrarch eval arithmetic [MODEL] [settings]\n" in help_of("eval", capsys)
    reading = read("eval", ["arithmetic", "/some/model", "--limit", "3"])
    assert reading.errors == ()
    assert (reading.args.model, reading.namespace.limit) == ("/some/model", 3)


@pytest.mark.parametrize("words", [[], ["arithmetics"], ["/some/model"], ["--limit", "3"]])
def test_a_task_that_is_missing_or_wrong_is_named_with_the_right_words(words: list[str]) -> None:
    [error] = read("eval", words).errors
    assert "task" in error.what
    assert "tetrarch eval arithmetic" in error.fix


def test_all_that_is_wrong_with_the_words_is_reported_together() -> None:
    misspelt, limit = read("eval", ["--prot", "1", "arithmetic", "--limit", "0"]).errors
    assert "'--prot'" in misspelt.what
    assert "--port" in misspelt.fix
    assert limit.what == "--limit 0"
    [error] = read("generate", []).errors
    assert "--prompt" in error.what
