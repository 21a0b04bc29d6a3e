# SPDX-License-Identifier: Apache-2.0
"""What becomes of the engine when its weights have changed: their version, and old keys."""

from __future__ import annotations

from typing import Any

from tetrarch.core.log import get_logger
from tetrarch.engine.engine import Engine
from tetrarch.engine.replies import update_facts, update_summary
from tetrarch.executor.updates import UpdateReport

__all__ = ["Adoption"]

_log = get_logger(__name__)


class Adoption:
    """Lets an engine know its new weights, and counts updates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_done = 0

    @property
    def num_held(self) -> int:
        """Requests that cannot go on while weights are written."""
        return max(self._engine.num_paused, self._engine.num_running)

    @property
    def names(self) -> dict[str, Any]:
        """What the weights are called, as keys of a payload."""
        path = self._engine.rank.weights.path
        return {"weight_version": self._engine.weight_version, "model_path": path}

    def rename(self, version: str | None) -> None:
        """Call the weights so, unless it is `None`."""
        self._engine.weight_version = version or self._engine.weight_version

    def adopt(
        self, report: UpdateReport | None, *, source: str, version: str | None, flush: bool
    ) -> dict[str, Any]:
        """Take over the weights of an update.

        Args:
            report: What it wrote; `None` if none was open.
            source: Where it came from: `disk`, `tensor` or `distributed`.
            version: What they are called; `None` counts.
            flush: Whether old keys and values go.

        Returns:
            Keys of a payload.
        """
        num_held = self.num_held
        if report is not None and report.num_tensors > 0:
            self._num_done += 1
            self.rename(version or str(self._num_done))
            log = _log.warning if report.unused else _log.info
            log("%s; version %s", update_summary(report), self._engine.weight_version)
        if flush:
            self._engine.renew()
        facts = {} if report is None else {"source": source, **update_facts(report)}
        return {"num_paused_requests": num_held, **facts, **self.names}
