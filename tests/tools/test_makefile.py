# SPDX-License-Identifier: Apache-2.0
"""`make help` tells a newcomer what there is, and installs nothing to do so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def test_help_has_a_line_for_every_target(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["make", "--no-print-directory", "-f", str(MAKEFILE), "help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    shown = re.findall(r"^  make (\S+) +\S", ran.stdout, re.MULTILINE)
    [targets] = re.findall(r"^\.PHONY: (.+)$", MAKEFILE.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(targets.split())
    assert list(tmp_path.iterdir()) == []
