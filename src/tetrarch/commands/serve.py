# SPDX-License-Identifier: Apache-2.0
"""`tetrarch serve [MODEL] [settings]`: answer over HTTP until stopped."""

from __future__ import annotations

import sys

from tetrarch.commands.bars import Bars
from tetrarch.config.cli import Reading
from tetrarch.config.launch import plan_launch
from tetrarch.core.log import configure_logging, get_logger
from tetrarch.models.describe import describe
from tetrarch.models.fetch import fetch
from tetrarch.serve.launch import serve

__all__ = ["run"]

_log = get_logger(__name__)


def run(reading: Reading) -> int:
    """Serve, and return the exit status.

    Raises:
        TetrarchError: What is wrong with this launch, or what stopped the engine.
    """
    configure_logging(level=reading.args.log_level)
    plan = plan_launch(reading, describe=describe, fetch=fetch)
    for decision in plan.decisions:
        _log.info("%s = %s: %s", decision.field, decision.value, decision.why)
    with Bars() as bars:
        serve(plan, announce=_announce, progress=bars)
    return 0


def _announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
