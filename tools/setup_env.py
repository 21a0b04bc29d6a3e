# SPDX-License-Identifier: Apache-2.0
"""Create .venv and install tetrarch into it; what `make setup` runs. Standard library only.

torch comes first, and from a CPU wheel where one can be seen: PyPI's torch for Linux x86-64 is the
CUDA build, which brings gigabytes that a CPU never uses. A second run with unchanged requirements
does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MIN_PYTHON = (3, 11)
INDEX_TIMEOUT_S = 10  # an unreachable index must not hold up a machine without a network


def main() -> int:
    """Run the steps; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="comma-separated extras, such as test,check")
    parser.add_argument("--torch-index", default="", help="index to look for a CPU torch on")
    asked = parser.parse_args()
    extras = frozenset(filter(None, asked.extras.split(",")))
    if (problem := _python_problem()) is not None:
        print(problem, file=sys.stderr)
        return 1
    stamp = VENV / f".tetrarch-{_digest()}"
    installed = _installed_extras(stamp)
    if installed is not None and extras <= installed:
        return 0
    if not PYTHON.exists():
        print("setup: creating .venv")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    _install_torch(asked.torch_index)
    wanted = sorted(extras | (installed or frozenset()))
    target = f".[{','.join(wanted)}]" if wanted else "."
    print(f"setup: installing tetrarch{target[1:]} (pinned by constraints.txt)")
    _pip("install", "--quiet", "-c", "constraints.txt", "-e", target)
    stamp.write_text(json.dumps(wanted))
    return 0


def _python_problem() -> str | None:
    if sys.version_info < MIN_PYTHON:
        return f"setup: python3 is {platform.python_version()}; tetrarch needs 3.11 or newer"
    probe = subprocess.run([sys.executable, "-c", "import ensurepip"], capture_output=True)
    if probe.returncode != 0:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            "setup: this Python cannot create virtual environments (no ensurepip)\n"
            f"  fix  apt install python{version}-venv, or dnf install python3, then run make again"
        )
    return None


def _digest() -> str:
    text = (ROOT / "constraints.txt").read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


def _installed_extras(stamp: Path) -> frozenset[str] | None:
    return frozenset(json.loads(stamp.read_text())) if stamp.exists() else None


def _install_torch(index: str) -> None:
    """Install the pinned torch, preferring a CPU build; say so when there is only a CUDA one."""
    want = _pinned_torch()
    found = subprocess.run(
        [str(PYTHON), "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
    )
    if found.returncode == 0 and found.stdout.strip().partition("+")[0] == want:
        return
    if not _cuda_is_default() or _wheel_version(want) not in (None, want):
        print(f"setup: installing torch {want} (CPU build)")
        _pip("install", "--quiet", f"torch=={want}")
        return
    if index and _wheel_version(want, index) is not None:
        print(f"setup: installing torch {want} (CPU build, from {index})")
        _pip("install", "--quiet", "--extra-index-url", index, f"torch=={want}+cpu")
        return
    what = "this machine has an NVIDIA driver" if shutil.which("nvidia-smi") else "no CPU wheel"
    print(f"setup: installing torch {want}: {what}, so this is the CUDA build, about 3 GB")
    _pip("install", f"torch=={want}")


def _pinned_torch() -> str:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.removeprefix("torch==").strip()
    raise SystemExit("setup: constraints.txt does not pin torch")


def _cuda_is_default() -> bool:
    """Whether PyPI's torch for this machine is a CUDA build."""
    return sys.platform == "linux"


def _wheel_version(want: str, index: str = "") -> str | None:
    """Return the version pip would install: `2.13.0+cpu` where a local CPU wheel is visible."""
    where = ("--index-url", index, "--timeout", str(INDEX_TIMEOUT_S), "--retries", "0")
    plain = ("--dry-run", "--quiet", "--no-deps", "--ignore-installed")
    command = ("install", *plain, "--report", "-", f"torch=={want}")
    seen = _pip(*command, *(where if index else ()), capture=True)
    if seen is None:
        return None
    report = json.loads(seen)
    return str(report["install"][0]["metadata"]["version"])


def _pip(*arguments: str, capture: bool = False) -> str | None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    if not capture:
        subprocess.run(command, check=True, cwd=ROOT)
        return None
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return ran.stdout if ran.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main())
