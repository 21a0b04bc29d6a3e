# SPDX-License-Identifier: Apache-2.0
"""Create .venv-compat: .venv, but for the older versions that constraints-compat.txt names.

What is not named there is .venv's, found through a path file, so that torch is installed once. A
second run with unchanged requirements does nothing.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints-compat.txt"
VENV = ROOT / ".venv-compat"


def main() -> None:
    """Run the steps."""
    [base] = (ROOT / ".venv").resolve().glob("lib/python3*/site-packages")
    text = PINS.read_text()
    stamp = VENV / f".tetrarch-{hashlib.sha256(f'{base}{text}'.encode()).hexdigest()[:16]}"
    if stamp.exists():
        return
    print("setup: creating .venv-compat")
    python = str((ROOT / ".venv" / "bin" / "python").absolute())
    subprocess.run([python, "-m", "venv", "--clear", str(VENV)], check=True)
    [site] = VENV.glob("lib/python3*/site-packages")
    (site / "base.pth").write_text(f"{base}\n")
    wanted = [line for line in text.splitlines() if line and not line.startswith("#")]
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-warn-conflicts", *wanted], cwd=ROOT, check=True)
    stamp.touch()


if __name__ == "__main__":
    sys.exit(main())
