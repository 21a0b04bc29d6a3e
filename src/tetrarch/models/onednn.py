# SPDX-License-Identifier: Apache-2.0
"""How a small model on the CPU multiplies a few rows without oneDNN.

oneDNN looks up, and often repacks, before it multiplies, 40 to 70 µs for weights up to 1024 x 256.
For one BF16 row torch's own loop is faster, 26 µs with a 256 x 256 weight, but it takes as long
again for every two rows more. For the four rows of a verification of three drafts the weight is
widened, and MKL's FP32 product taken: 66 µs with 512 x 256, where torch's loop takes 114 and oneDNN
69; 36, 52 and 40 with 256 x 256 (torch 2.13, one core of a Sapphire Rapids Xeon, 48 weights in
turn). The model is so small that routers count, which oneDNN would slow down from 7 µs to 38.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FEW_ROWS", "FewRows", "is_small", "without_onednn"]

FEW_ROWS = 4  # up to which oneDNN does not pay
_SMALL = 1 << 20  # elements of the largest weight


def is_small(model: nn.Module) -> bool:
    """Whether all linear layers of a CPU model are below the size from which oneDNN pays."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return all(w.device.type == "cpu" and w.numel() < _SMALL for w in weights)


class FewRows:
    """`F.linear`, but that two to four rows are multiplied in FP32 and rounded once."""

    def __init__(self) -> None:
        self._room = torch.empty(0)  # a widened weight; a fresh piece each time costs more

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply rows (..., K) by a weight (N, K)."""
        are_few = 1 < rows.numel() // rows.shape[-1] <= FEW_ROWS and weight.numel() < _SMALL
        if not are_few or weight.dtype == torch.float32:
            return F.linear(rows, weight, bias)
        if self._room.numel() < weight.numel():
            self._room = torch.empty(weight.numel())
        wide = self._room.as_strided(weight.shape, weight.stride()).copy_(weight)
        return F.linear(rows.float(), wide, None if bias is None else bias.float()).to(rows.dtype)


@contextmanager
def without_onednn() -> Generator[None, None, None]:
    """Run without oneDNN; one thread computes, so the process-wide switch is ours to flip."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # pyright: ignore  # a property in the guise of a module
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # pyright: ignore
