# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic and sizes for people."""

from __future__ import annotations

__all__ = ["GIB", "MIB", "align_up", "ceil_div", "format_bytes"]

MIB = 1 << 20
GIB = 1 << 30


def ceil_div(value: int, divisor: int) -> int:
    """Return `value / divisor` rounded up."""
    return -(-value // divisor)


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def format_bytes(num_bytes: int) -> str:
    """Return a size with a binary unit: `1.5 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
