# SPDX-License-Identifier: Apache-2.0
"""Where a number comes from: what every result file says about its run."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

__all__ = ["provenance"]


def provenance() -> dict[str, str | int]:
    """Return command, date, commit, versions and processor."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (subprocess.CalledProcessError, FileNotFoundError):
        commit = "not a checkout"
    cpuinfo = Path("/proc/cpuinfo")  # Linux only
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": models[0] if models else platform.machine(),
        "logical_cores": len(models),
    }
