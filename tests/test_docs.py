# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: files, tests, links, flags."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tetrarch.config.cli import LaunchParser, add_launch_arguments, read_command_line

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("tools/**/*.md")]
TREES = ("src", "tests", "tools", "docs", "benchmarks", "examples")
ROOMS = {path.name for path in (ROOT / "src" / "tetrarch").iterdir() if path.is_dir()}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def spans(page: Path) -> list[str]:
    """Code between single backquotes; fenced blocks are left out."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def missing(span: str) -> str | None:
    """Return what a span names and nobody has; `None` where it names nothing of ours."""
    path, _, test = span.partition("::")
    if not re.fullmatch(r"[\w./-]+\.(py|md|json|txt)|[\w./-]+/", path) or "/" not in path:
        return None
    first = path.split("/")[0]
    if first in ROOMS:
        found = ROOT / "src" / "tetrarch" / path
    elif first in TREES:
        found = ROOT / path
    else:
        return None
    if not found.exists():
        return path
    return span if test and f"def {test}(" not in found.read_text() else None


@pages
def test_every_file_and_test_that_a_page_names_exists(page: Path) -> None:
    assert [span for span in spans(page) if missing(span)] == []


@pages
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pages
def test_every_command_that_a_page_names_is_understood(page: Path) -> None:
    """Flags and the values of choices; what a launch is refused for comes later."""
    for span in spans(page):
        words = shlex.split(span) if span.startswith("tetrarch ") else []
        if len(words) < 2 or words[1] not in ("serve", "explain") or "[MODEL]" in words:
            continue
        parser = LaunchParser()
        add_launch_arguments(parser)
        errors = read_command_line(parser, words[2:], {}).errors
        assert not errors, (span, [str(error) for error in errors])


def test_the_check_can_fail() -> None:
    assert missing("config/nowhere.py") == "config/nowhere.py"
    assert missing("tests/test_docs.py::test_no_such") == "tests/test_docs.py::test_no_such"
    assert missing("tests/test_docs.py::test_the_check_can_fail") is None
    assert missing("/v1/models") is None


def test_the_readmes_qualities_are_those_of_the_result_file() -> None:
    result = json.loads((ROOT / "benchmarks/results/cpu/quality.json").read_text())
    splits: dict[str, dict[str, dict[str, float]]] = {}
    for row in result["rows"]:
        name = f"{row['quantization']} / {row['moe_activations']}"
        splits.setdefault(name, {})[row["split"]] = row
    expected = {
        f"| {name} | "
        + " | ".join(f"{of[split]['accuracy']:.2f}" for split in ("test", "comp", "hard"))
        + f" | {of['hard']['answer_nll']:.2e} |"
        for name, of in splits.items()
    }
    assert expected <= set((ROOT / "README.md").read_text().splitlines())
    assert splits["none / bf16"]["test"]["accuracy"] == 1.0
    assert splits["none / bf16"]["test"]["problems"] == 100
