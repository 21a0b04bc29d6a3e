# SPDX-License-Identifier: Apache-2.0
"""CUDA memory that can be given back, if torch_memory_saver is there; this is its one room."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from tetrarch.core.errors import ConfigError
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.arena import Arena

__all__ = ["FixedArena", "Saver", "SaverArena", "load_saver"]


class Saver(Protocol):
    """What we use of torch_memory_saver. Its own error handling ends the process; ours does not
    let it come to that: no tag is paused twice, and none is resumed that was not paused.
    """

    hook_mode: str

    def region(self, *, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]:
        """Allocations of this block belong to `tag`."""
        ...

    def pause(self, tag: str) -> None:
        """Unmap the memory of a tag, after copying it to the host if its region says so."""
        ...

    def resume(self, tag: str) -> None:
        """Map memory again at the same addresses."""
        ...


class SaverArena(Arena):
    """CUDA memory that torch_memory_saver can unmap.

    Written against version 0.0.10. The tests run it with a fake; nothing here has run on a GPU.

    Args:
        saver: The module's one object.
        tag: The region's name; one process has one arena of a tag.
        backup: Whether every release keeps the contents, in host memory. It is decided when
            memory is allocated, so `keep` can only insist on it.
    """

    def __init__(self, saver: Saver, *, tag: str, backup: bool) -> None:
        super().__init__()
        self._saver, self._tag, self._backup = saver, tag, backup

    def _allocate(self, spec: TensorSpec) -> Tensor:
        with self._saver.region(tag=self._tag, enable_cpu_backup=self._backup):
            return spec.empty()

    def keep(self) -> None:
        """Insist that releases keep the contents. See the base class."""
        if not self._backup:
            raise ConfigError(
                f"the contents of {self._tag} on the GPU cannot be kept",
                why="their memory was allocated without a backup",
                fix="start with --enable-weights-cpu-backup, or release without a backup",
            )

    def _give_back(self) -> None:
        torch.cuda.synchronize()  # a kernel in flight must not find its memory gone
        self._saver.pause(self._tag)

    def _take_again(self) -> None:
        self._saver.resume(self._tag)


class FixedArena(Arena):
    """A device's ordinary memory: it cannot be given back, and says what would allow it."""

    def _allocate(self, spec: TensorSpec) -> Tensor:
        return spec.empty()

    def keep(self) -> None:
        """Refuse. See the base class."""
        raise self._refusal()

    def _give_back(self) -> None:
        raise self._refusal()

    def _take_again(self) -> None:
        raise AssertionError("a fixed arena is never released")

    def _refusal(self) -> ConfigError:
        return ConfigError(
            "this server cannot release GPU memory",
            why="it was started without --enable-memory-saver",
            fix="pip install 'tetrarch[memory-saver]', then start with --enable-memory-saver",
        )


@cache
def load_saver() -> Saver:
    """Import torch_memory_saver, an optional extra.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        saver = cast("Saver", importlib.import_module("torch_memory_saver").torch_memory_saver)
    except ImportError as error:
        raise ConfigError(
            "--enable-memory-saver needs torch_memory_saver",
            why=str(error),
            fix="pip install 'tetrarch[memory-saver]', or leave the flag out",
        ) from error
    # Its other mode, "preload", needs LD_PRELOAD at the start; only graphs' own memory asks for it.
    saver.hook_mode = "torch"
    return saver
