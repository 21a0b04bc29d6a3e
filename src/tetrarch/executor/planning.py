# SPDX-License-Identifier: Apache-2.0
"""What a folder's headers tell of an update, before a byte of a tensor is read."""

from __future__ import annotations

import time
from pathlib import Path

from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.headers import read_headers
from tetrarch.config.plan import Plan
from tetrarch.core.errors import TetrarchError
from tetrarch.core.log import get_logger
from tetrarch.executor.updates import DiskUpdate, unreadable
from tetrarch.models.build import Model
from tetrarch.models.compare import check_same_model
from tetrarch.models.placement import Placements, Placer
from tetrarch.models.sources import Source, open_checkpoint

__all__ = ["Planner"]

_log = get_logger(__name__)


class Planner:
    """Compares checkpoints with one model; remembers where the last one's tensors went."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self._model, self._plan, self._placer = model, plan, Placer(model, plan.quant)

    def place(self, source: Source) -> Placements:
        """Place a whole checkpoint.

        Raises:
            CheckpointError: It does not fit the model.
        """
        return self._placer.place(source)

    def plan(self, path: str, *, atomic: bool) -> DiskUpdate:
        """Plan an update from a local folder; on any thread.

        Args:
            path: The folder.
            atomic: Whether a failure will restore the old weights.

        Raises:
            CheckpointError: Names, shapes, types, formats or the configuration do not fit.
        """
        began = time.perf_counter()
        try:
            headers = read_headers(Path(path))  # once: of fifty thousand tensors it takes 0.2 s
            read_checkpoint(path, headers)  # refuses what its files declare and we cannot load
            check_same_model(self._model, path)
            source = open_checkpoint(self._plan, path, headers)
            placements = self.place(source)
        except TetrarchError:
            raise
        except Exception as error:  # files may hold anything, and a path be none
            _log.warning("planning an update met what it did not expect", exc_info=error)
            raise unreadable(path, error) from error
        return DiskUpdate(
            path=path,
            source=source,
            placements=placements,
            atomic=atomic,
            seconds=time.perf_counter() - began,
        )
