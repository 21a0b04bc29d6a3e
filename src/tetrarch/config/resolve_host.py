# SPDX-License-Identifier: Apache-2.0
"""Settle threads, and what libraries of the engine process read from their environment."""

from __future__ import annotations

from tetrarch.config.args import LaunchArgs
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import ParallelPlan

__all__ = ["PROCESS_ENV", "resolve_process_env", "resolve_threads"]

_GPU_THREADS = 8  # a GPU's host side tokenizes and launches; more threads only wake each other

# Variable, value (`{threads}` is filled in), reason.
PROCESS_ENV: tuple[tuple[str, str, str], ...] = (
    ("OMP_NUM_THREADS", "{threads}", "torch's CPU kernels: --threads"),
    ("MKL_NUM_THREADS", "{threads}", "the same for MKL"),
    (
        "OMP_WAIT_POLICY",
        "PASSIVE",
        "idle threads sleep: spinning ones steal the cores that the HTTP server needs",
    ),
    ("KMP_BLOCKTIME", "0", "the same for Intel's OpenMP"),
    ("TOKENIZERS_PARALLELISM", "false", "one request's text is too short for threads"),
    ("HF_HUB_OFFLINE", "1", "the checkpoint is a local folder by now; nothing may reach out"),
)


def resolve_threads(
    args: LaunchArgs, parallel: ParallelPlan, device: Device, ledger: Ledger
) -> int:
    """Settle the CPU threads of one engine process."""
    # On two busy cores two threads made a fifth fewer tokens/s than one, because the second one
    # and the HTTP process took turns (demo model, 16 streams, 2026-11-30).
    share = max(1, (device.physical_cores - 1) // parallel.world_size)
    why = f"{device.physical_cores} physical cores, of which one is left to the HTTP process"
    if device.arch is not Arch.CPU and share > _GPU_THREADS:
        share, why = _GPU_THREADS, f"enough for the host side of a GPU; {why}"
    return ledger.pick("threads", args.threads, share, why)


def resolve_process_env(threads: int) -> tuple[tuple[str, str], ...]:
    """Return the environment that an engine process is spawned with, besides its parent's."""
    return tuple((name, value.format(threads=threads)) for name, value, _ in PROCESS_ENV)
