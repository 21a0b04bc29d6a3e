# SPDX-License-Identifier: Apache-2.0
"""`make setup` picks a CPU torch where it can see one, and says so when it cannot."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "tools" / "setup_env.py"


@pytest.fixture
def setup_env(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # No torch in the environment that is being set up.
    nothing = subprocess.CompletedProcess([], returncode=1, stdout="", stderr="")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: nothing)
    return module


@pytest.mark.parametrize(
    ("visible", "index", "installs", "says"),
    [
        ({"": "2.13.0+cpu"}, "", ["torch==2.13.0"], "CPU build"),
        (
            {"": "2.13.0", "https://cpu": "2.13.0+cpu"},
            "https://cpu",
            ["--extra-index-url", "https://cpu", "torch==2.13.0+cpu"],
            "CPU build, from https://cpu",
        ),
        ({"": "2.13.0"}, "https://cpu", ["torch==2.13.0"], "about 3 GB"),
        ({"": "2.13.0"}, "", ["torch==2.13.0"], "about 3 GB"),
    ],
)
def test_torch_comes_from_the_smallest_build_that_is_visible(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    visible: dict[str, str],
    index: str,
    installs: list[str],
    says: str,
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(setup_env, "_pinned_torch", lambda: "2.13.0")
    monkeypatch.setattr(setup_env, "_cuda_is_default", lambda: True)
    monkeypatch.setattr(setup_env, "_wheel_version", lambda want, at="": visible.get(at))
    monkeypatch.setattr(setup_env, "_pip", lambda *args, **kwargs: ran.append(list(args)))
    setup_env._install_torch(index)
    assert [word for word in ran[-1] if word not in ("install", "--quiet")] == installs
    assert says in capsys.readouterr().out


def test_a_python_without_venv_is_told_what_to_install(setup_env: ModuleType) -> None:
    problem = setup_env._python_problem()
    assert "ensurepip" in problem
    assert "-venv" in problem


def test_other_requirements_make_another_stamp(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text("a==1")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    before = setup_env._digest()
    (tmp_path / "constraints.txt").write_text("a==2")
    assert setup_env._digest() != before
