# SPDX-License-Identifier: Apache-2.0
"""The command line: usage, exit statuses, errors in three lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tetrarch.__main__ import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["server"]])
def test_a_wrong_command_shows_usage_and_fails(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "usage: tetrarch" in capsys.readouterr().err


def test_an_explained_error_is_three_lines_and_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--quantisation", "none"]) == 1
    what, why, fix = capsys.readouterr().err.splitlines()
    assert "--quantisation" in what
    assert why.startswith("  why  ")
    assert "--quantization" in fix


def test_all_errors_of_a_launch_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--tp-size", "4", "--moe-dispatch", "deepep"]) == 1
    shown = capsys.readouterr().err
    assert "--tp-size 4" in shown
    assert "DeepEP" in shown


def test_help_does_not_wait_for_torch() -> None:
    probe = (
        "import sys; from tetrarch.__main__ import main; main(['--help']); "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"


def test_a_closed_pipe_is_no_error() -> None:
    shell = f"{sys.executable} -m tetrarch explain | head -n 1"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert ran.stdout == "model\n"
    assert "BrokenPipe" not in ran.stderr
