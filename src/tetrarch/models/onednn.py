# SPDX-License-Identifier: Apache-2.0
"""When torch's own product beats oneDNN on the CPU.

oneDNN looks up, and often repacks, before it multiplies: 40 to 70 µs whatever the size, up to
1024 x 256. torch's own loop takes a third of a nanosecond for each weight and row: 26 µs for one
BF16 row and a 256 x 256 weight, 46 for two, 86 for four, 165 for eight (torch 2.13, one core of a
Sapphire Rapids Xeon). So a small model computes a few rows without oneDNN, routers and all, except
for the products that are long enough.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FEW_ROWS", "is_small", "product", "without_onednn"]

FEW_ROWS = 4  # up to which a small model does without; as many as three drafts make
_SMALL = 1 << 20  # elements of the largest weight
_SHORT = 1 << 17  # rows times elements of a weight: torch's 45 µs


def is_small(model: nn.Module) -> bool:
    """Whether all linear layers of a CPU model are below the size from which oneDNN pays."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return all(w.device.type == "cpu" and w.numel() < _SMALL for w in weights)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do as `F.linear`, with oneDNN where several rows make the product long."""
    if rows.numel() == rows.shape[-1] or rows.numel() * len(weight) <= _SHORT:
        return F.linear(rows, weight, bias)
    before = _switch(on=True)
    try:
        return F.linear(rows, weight, bias)
    finally:
        _switch(on=before)


@contextmanager
def without_onednn() -> Generator[None, None, None]:
    """Run without oneDNN; one thread computes, so the process-wide switch is ours to flip."""
    before = _switch(on=False)
    try:
        yield
    finally:
        _switch(on=before)


def _switch(*, on: bool) -> bool:
    """Turn oneDNN on or off; return what it was."""
    before: bool = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = on  # pyright: ignore  # a property in the guise of a module
    return before
