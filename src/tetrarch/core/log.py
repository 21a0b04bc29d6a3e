# SPDX-License-Identifier: Apache-2.0
"""One logger, whose lines name the rank that wrote them."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure_logging", "get_logger"]

_ROOT = "tetrarch"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (`get_logger(__name__)`)."""
    return logging.getLogger(name)


def configure_logging(*, level: str = "info", who: str = "") -> None:
    """Send our log lines to standard error, once per process.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        who: Shown in every line; the process or rank, such as `engine` or `rank 3`.
    """
    root = logging.getLogger(_ROOT)
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    label = f" {who}" if who else ""
    line = f"%(asctime)s %(levelname).1s{label} %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
