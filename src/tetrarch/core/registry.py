# SPDX-License-Identifier: Apache-2.0
"""A name that stands for an object which is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Registry"]


class Registry(Mapping[str, Any]):
    """Map names to `"module:attribute"`; nothing is imported until it is asked for.

    A runner's module imports its vendor at the top, so a machine without that vendor can still
    list, refuse and document the runner.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets  # the mapping's own way would import

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
