# SPDX-License-Identifier: Apache-2.0
"""Every specialization compiles for every architecture; units and slots are what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interpreter import repair

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
kernels = pytest.importorskip("tetrarch.kernels.attention.triton_kernels")

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
# The others take their time in `make check-slow`.
ARCHS = [pytest.param(a, marks=() if a == 90 else pytest.mark.slow) for a in SHARED_BYTES]
SPAN, ROOM = 32, 12


def compile_forms(arch: int, *forms: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Return shared memory and cubin size of each form's kernels."""
    script = Path(__file__).with_name("compile_attention.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(script), str(arch), *forms],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    return {(form, name): (int(shared), int(size)) for form, name, shared, size in lines}


@pytest.mark.parametrize("arch", ARCHS)
def test_one_form_compiles_for_every_architecture(arch: int) -> None:
    compiled = compile_forms(arch, "windowed")
    assert {name for _, name in compiled} == set(kernels.__all__)
    for shared, size in compiled.values():
        assert shared <= SHARED_BYTES[arch]
        assert size > 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_every_form_compiles_for_every_architecture(arch: int) -> None:
    compiled = compile_forms(arch)
    assert len(compiled) == 5 * 11
    assert all(shared <= SHARED_BYTES[arch] for shared, _ in compiled.values())


@pytest.mark.parametrize("window", [0, 40])
def test_units_are_the_spans_of_short_sequences(window: int, device: torch.device) -> None:
    lens = [(1, 65), (5, 300), (0, 0), (2, 64), (1, 1), (1, 97)]
    ends = torch.tensor([0, *(q_len for q_len, _ in lens)]).cumsum(0).int().to(device)
    kv_lens = torch.tensor([kv for _, kv in lens], dtype=torch.int32, device=device)
    starts = torch.full((len(lens) + 1,), -9, dtype=torch.int32, device=device)
    units = torch.full((ROOM + 1, 8), -9, dtype=torch.int32, device=device)
    kernels.list_units[(len(lens),)](
        ends, kv_lens, starts, units, window, 2, ROOM, SPAN=SPAN, BLOCK=4
    )
    want: list[list[int]] = []
    counts = [0]
    for row, (q_len, kv_len) in enumerate(lens):
        if 0 < q_len <= 2:
            first = max(0, kv_len - q_len + 1 - window) // SPAN if window else 0
            begins = range(first * SPAN, kv_len, SPAN)
            token = int(ends[row])
            want += [[row, at, token, q_len, kv_len, len(begins) == 1] for at in begins]
        counts.append(len(want))
    assert starts.tolist() == counts
    assert units[: len(want), :6].tolist() == want
    assert (units[len(want) :] == -9).all()


def test_units_beyond_the_buffer_are_dropped(device: torch.device) -> None:
    """The host refuses such a step; should it not, nothing else may be overwritten."""
    ends = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    kv_lens = torch.tensor([SPAN * 10, SPAN * 10], dtype=torch.int32, device=device)
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    units = torch.full((ROOM + 20, 8), -9, dtype=torch.int32, device=device)
    kernels.list_units[(2,)](ends, kv_lens, starts, units, 0, 1, ROOM, SPAN=SPAN, BLOCK=4)
    assert starts.tolist() == [0, 10, ROOM]
    assert (units[ROOM:] == -9).all()


def test_tokens_without_a_slot_are_not_written(device: torch.device) -> None:
    keys, values = torch.zeros(2, 4, 2, 8, device=device), torch.zeros(2, 4, 2, 24, device=device)
    key, value = torch.rand(2, 5, 8, device=device), torch.rand(2, 5, 24, device=device)
    at = torch.tensor([7, -1, 0, 3, -1], device=device)
    kernels.write_rows[(2, 2)](
        key, value, keys, values, at, 5, 8, 40, 24, 120,
        GROUPS=2, DIM=8, VALUE_DIM=24, TOKENS=4, BLOCK=32, OVERLAP=False,
    )  # fmt: skip
    for pool, rows in ((keys, key), (values, value)):
        want = torch.zeros_like(pool).flatten(0, 1)
        for token, slot in enumerate(at.tolist()):
            if slot >= 0:
                want[slot] = rows[:, token]
        assert torch.equal(pool.flatten(0, 1), want)
