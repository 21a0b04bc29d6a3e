# SPDX-License-Identifier: Apache-2.0
"""The command line: usage, exit statuses, errors in three lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
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


def test_a_wrong_command_is_told_which_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "did you mean `tetrarch serve`?" in capsys.readouterr().err
    assert main(["no-likeness"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_what_the_words_and_what_the_resolver_refuse_comes_in_one_run_and_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--prot", "1", "--tp-size", "4"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("--prot") == shown.count("--tp-size 4") == 1


IMPORTING = """
import signal, sys
from tetrarch import __main__ as program
class Vendor:  # turns what interrupts it into an error of its own, as extension modules do
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("initialization failed")
sys.meta_path.insert(0, Vendor())
sys.argv = ["tetrarch", "explain"]
sys.exit(program.main())
"""


def test_ctrl_c_while_importing_is_one_line() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "tetrarch: interrupted\n")


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return ""


def imports_torch(process: psutil.Process) -> bool:
    return "libtorch_cpu" in maps(process.pid)


def has_engine(process: psutil.Process) -> bool:
    return bool(process.children())


def engine_imports_torch(process: psutil.Process) -> bool:
    return any(map(imports_torch, process.children()))


@pytest.mark.parametrize(
    ("command", "moment"),
    [("serve", imports_torch), ("serve", engine_imports_torch), ("generate", has_engine)],
)
def test_ctrl_c_while_starting_is_one_line_and_leaves_no_process(
    command: str, moment: Callable[[psutil.Process], bool]
) -> None:
    """As a terminal does it: the whole group hears it."""
    words = {"serve": ["--port", "0"], "generate": ["--prompt", "a"]}
    quiet = ["--threads", "1", "--log-level", "error"]
    run = subprocess.Popen(
        [sys.executable, "-m", "tetrarch", command, *words[command], *quiet],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process = psutil.Process(run.pid)
    while run.poll() is None and not moment(process):
        time.sleep(0.01)
    engine = process.children()
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, out, err) == (130, "", "tetrarch: interrupted\n")
    assert not psutil.wait_procs(engine, timeout=5)[1]


def test_a_closed_pipe_is_no_error() -> None:
    shell = f"{sys.executable} -m tetrarch explain | head -n 1"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert ran.stdout == "model\n"
    assert "BrokenPipe" not in ran.stderr
