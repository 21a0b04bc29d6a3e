# SPDX-License-Identifier: Apache-2.0
"""Start an engine for a command, and let whoever waits see that something happens."""

from __future__ import annotations

import time

from tetrarch.config.plan import Plan
from tetrarch.core.log import get_logger
from tetrarch.core.progress import Progress
from tetrarch.llm import LLM

__all__ = ["load"]

_log = get_logger(__name__)


def load(plan: Plan, progress: Progress) -> LLM:
    """Start the engine of a plan; a line at each end, because a bar is seen on a terminal only.

    Raises:
        TetrarchError: What stopped the start.
    """
    start = time.monotonic()
    _log.info("loading %s as %s", plan.model.served_name, plan.quant.contract.name)
    llm = LLM(plan=plan, progress=progress)
    _log.info("ready after %.1f s", time.monotonic() - start)
    return llm
