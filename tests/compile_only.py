# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for a GPU that this machine does not have.

Host code runs as it is, on CPU tensors; each launch compiles its kernel and launches nothing.
To be used in a process of its own, where the interpreter is off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

__all__ = ["SHARED_BYTES", "compile_for"]

# Shared memory that one block may ask for, by architecture.
SHARED_BYTES = {
    80: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
}


def compile_for(arch: int) -> list[tuple[str, Any]]:
    """From now on launches compile for sm_`arch`; returns the list that they add to."""
    target = GPUTarget("cuda", arch, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(fake)  # type: ignore[arg-type]
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_instead
    return compiled
