# SPDX-License-Identifier: Apache-2.0
"""What is installed is what was tested: the wheel holds the demo model and runs from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_carries_the_demo_model_and_plans_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True)
    [wheel] = tmp_path.glob("tetrarch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    shipped = {
        f"tetrarch/demo_model/{path.name}"
        for path in (ROOT / "src/tetrarch/demo_model").iterdir()
        if path.is_file()
    }
    assert shipped <= packed
    assert "tetrarch/demo_model/model.safetensors" in shipped
    prompt = ["generate", "--prompt", "What is 12 + 30?", "--max-total-tokens", "2048"]
    ran = subprocess.run(
        [sys.executable, "-m", "tetrarch", *prompt],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "12 + 30 = 42.\n#### 42\n"


def test_every_dependency_is_pinned_once_and_by_an_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==")[0].lower() for line in lines if line and not line.startswith("#")]
    assert len(pins) == len(set(pins))
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    wanted = {"torch", "transformers", "safetensors", "pyzmq", "msgspec", "rich"}
    assert wanted <= set(pins)
    assert not any("+" in line for line in lines), "a local build would not resolve elsewhere"
