# SPDX-License-Identifier: Apache-2.0
"""Check and time the Triton kernels on this machine's GPU, in one go.

    python tools/check_triton.py [--out FOLDER] [--tests ARGS] [--run "attention_tiles" ...]

Runs the tests marked `gpu`, then each benchmark in a process of its own; one that fails does not
stop the next. Results land as JSON in the folder; the summary and the exit status come last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = ("quantize_gpu", "experts_gpu", "attention_gpu")
TESTS = ("tests/kernels", "tests/moe")


def run(name: str, command: list[str]) -> str:
    """Run one step, its output passed through, and return its line of the summary."""
    print(f"\n=== {name}: {' '.join(command)}", flush=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]])}
    start = time.monotonic()
    status = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, check=False).returncode
    verdict = "ok" if status == 0 else f"FAILED ({status})"
    return f"{verdict:14}{name:16}{time.monotonic() - start:6.1f} s"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("check_triton"), help="folder of results")
    parser.add_argument("--tests", default="--tb=short", help="pytest's arguments; empty: none")
    parser.add_argument("--run", action="append", help="a benchmark and its arguments")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    summary: list[str] = []
    if args.tests:
        tests = ["-m", "pytest", "-m", "gpu", *shlex.split(args.tests), *TESTS]
        summary.append(run("tests", tests))
    for number, line in enumerate(args.run or BENCHMARKS):
        name, *rest = shlex.split(line)
        out = (args.out / f"{name}_{number}.json").resolve()
        summary.append(run(name, [f"benchmarks/{name}.py", *rest, "--json", str(out)]))
    print("\n" + "\n".join(summary))
    sys.exit(any("FAILED" in line for line in summary))


if __name__ == "__main__":
    main()
