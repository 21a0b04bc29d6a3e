# SPDX-License-Identifier: Apache-2.0
"""The row kernels compile for every architecture, on a machine that has none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install tetrarch[test-kernels]")

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
# The others take their time in `make check-slow`.
ARCHS = [pytest.param(a, marks=() if a == 90 else pytest.mark.slow) for a in SHARED_BYTES]
NAMES = {"_quantize_rows", "_encode_matrices"}
NAMES |= {"_count_chunk", "_rank_chunks", "_place_chunk", "_align_expert", "_finalize_rows"}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_kernel_compiles(arch: int) -> None:
    script = Path(__file__).with_name("compile_rows.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(script), str(arch)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert {name for _, name, _, _ in lines} == NAMES
    assert all(int(shared) <= SHARED_BYTES[arch] for _, _, shared, _ in lines)
    assert all(int(size) > 1000 for *_, size in lines)
