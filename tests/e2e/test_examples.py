# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a reader to run does run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_loop_without_learning_pushes_weights_in_every_way(trained: Any) -> None:
    """It checks itself: three ways give one checksum, and the first weights come back."""
    command = [sys.executable, str(EXAMPLES / "rl_loop.py"), "--url", trained.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "disk:" in done.stdout
    assert "broadcast 238 tensors" in done.stdout
    assert done.stdout.count("27 + 35 = 62") == 5
    assert "the first weights are back" in done.stdout
