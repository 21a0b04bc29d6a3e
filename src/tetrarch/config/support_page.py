# SPDX-License-Identifier: Apache-2.0
"""The support table as a page of the reference docs."""

from __future__ import annotations

from tetrarch.config.hardware import Arch
from tetrarch.config.support import REFUSED, SUPPORT, Route, arch_names, column_of

__all__ = ["markdown"]


def markdown() -> str:
    """Return the rows and the refusals as two tables of the reference docs."""
    columns = ("activations", "quantization", "runner", "dispatch", "arch", "wire", "finalize")
    rows = [
        [_archs(row) if column == "arch" else column_of(row, column) for column in columns]
        for row in SUPPORT
    ]
    refused = [[no.subject, no.why, no.fix] for no in REFUSED]
    return "\n\n".join((_table(columns, rows), _table(("refused", "why", "instead"), refused)))


def _archs(row: Route) -> str:
    if row.archs == frozenset(Arch):
        return "everywhere"
    untried = f"; compiled only: {arch_names(row.only_compiled)}" if row.only_compiled else ""
    return arch_names(row.archs - row.only_compiled) + untried


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
