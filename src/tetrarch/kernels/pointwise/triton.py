# SPDX-License-Identifier: Apache-2.0
"""Sums along rows in Triton: one program a row, in an order that knows no other row.

torch cuts a long sum by how many rows there are: from 768 elements on, a row alone sums to other
bits than among 33 (torch 2.11, H200).
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["row_sum"]


@triton.jit
def _sum_row(values, out, WIDTH: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    for start in range(0, WIDTH, STEP):
        part = tl.load(values + row * WIDTH + start + at, mask=start + at < WIDTH, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=0))


def row_sum(values: Tensor) -> Tensor:
    """Return the FP32 sum over the last dimension: (..., W) -> (...)."""
    rows = values.contiguous().flatten(0, -2)
    out = values.new_empty(values.shape[:-1], dtype=torch.float32)
    if len(rows):
        width = rows.shape[1]
        step = min(4096, triton.next_power_of_2(width))
        _sum_row[(len(rows),)](rows, out, WIDTH=width, STEP=step, num_warps=4)
    return out
