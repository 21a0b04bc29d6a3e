# SPDX-License-Identifier: Apache-2.0
"""One GEMM per expert over its slice of rows: the torch definition.

Operands and sums are FP32, because the row factors of an NVFP4 GEMM multiply the accumulator
before it is rounded. With both operands NVFP4 products nearly every sum is exact in FP32, in any
order, so that a row's result does not depend on its neighbours. A BF16 `torch.mm` on the CPU
rounds its output to BF16, which that contract forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["grouped_gemm"]


def grouped_gemm(
    rows: Tensor, counts: Sequence[tuple[int, int]], *, weight: Callable[[int], Tensor], out: Tensor
) -> Tensor:
    """Multiply each group's rows with the group's weight.

    Args:
        rows: (N, K) fp32, sorted by group.
        counts: (group, its rows) in the order of the rows; the rows add up to N.
        weight: Returns a group's (K, O) fp32 weight.
        out: (N, O) fp32, overwritten.

    Returns:
        `out`.
    """
    sizes = [count for _, count in counts]
    pieces = zip(counts, rows.split_with_sizes(sizes), out.split_with_sizes(sizes), strict=True)
    for (group, _), group_rows, group_out in pieces:
        torch.mm(group_rows, weight(group), out=group_out)
    return out
