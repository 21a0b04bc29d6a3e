# SPDX-License-Identifier: Apache-2.0
"""The reference pages are what the declarations say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tetrarch.config.args import LaunchArgs
from tetrarch.config.spellings import VARIABLES
from tetrarch.core.knob import knobs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "tools" / "gen_reference.py"
    spec = importlib.util.spec_from_file_location("gen_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_in_the_repository_are_fresh(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0


def test_a_stale_or_missing_page_fails_the_check(
    generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generator.main(["--check", "--into", str(tmp_path)]) == 1
    assert generator.main(["--into", str(tmp_path)]) == 0
    assert generator.main(["--check", "--into", str(tmp_path)]) == 0
    with (tmp_path / "support.md").open("a") as page:
        page.write("by hand\n")
    assert generator.main(["--check", "--into", str(tmp_path)]) == 1
    assert "support.md is stale" in capsys.readouterr().err


def test_every_setting_and_variable_has_its_place(generator: ModuleType) -> None:
    pages = generator.pages()
    for field in knobs(LaunchArgs):
        assert f"\n### {field.name}\n" in pages["settings.md"]
        assert f"`{field.flag}`" in pages["settings.md"]
    for name in VARIABLES:
        assert f"| `{name}` |" in pages["environment.md"]
