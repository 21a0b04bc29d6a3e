# SPDX-License-Identifier: Apache-2.0
"""When torch's own matrix-vector product beats oneDNN on the CPU.

oneDNN looks up, and often repacks, before it multiplies: 28 µs for one BF16 row and a 256 x 256
weight, where torch's own loop takes 15 µs. Over the demo model's dense layers that is 3.9 against
2.8 ms a step (torch 2.13, one core of a Sapphire Rapids Xeon). It also loses with up to four rows,
as many as a verification of three drafts has: a whole step takes 9.1 against 7.9 ms with two or
three, 9.7 against 8.8 with four. With eight it wins, 9.3 against 10.1, and so it does with a weight
beyond 1024 x 1024.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["FEW_ROWS", "is_small", "without_onednn"]

FEW_ROWS = 4  # up to which oneDNN does not pay
_SMALL = 1 << 20  # elements of the largest weight


def is_small(model: nn.Module) -> bool:
    """Whether all linear layers of a CPU model are below the size from which oneDNN pays."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return all(w.device.type == "cpu" and w.numel() < _SMALL for w in weights)


@contextmanager
def without_onednn() -> Generator[None, None, None]:
    """Run without oneDNN; one thread computes, so the process-wide switch is ours to flip."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # pyright: ignore  # a property in the guise of a module
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # pyright: ignore
