# SPDX-License-Identifier: Apache-2.0
"""Every tolerance of the tests has a name and a reason. Where none is used, bits must be equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrarch.numerics.near_tie import NEAR_TIE  # eval uses it too

__all__ = [
    "EXTRA_FP32_ROUNDING",
    "FUSED_FINALIZE",
    "GPU_EXP",
    "NEAR_TIE",
    "RECIPROCAL_SCALE",
    "SGLANG_FP8_IN_FP16",
    "SUM_ORDER",
    "Tolerance",
    "assert_close",
]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two results may be apart: `|actual - expected| <= atol + rtol * |expected|`."""

    rtol: float
    atol: float
    reason: str


EXTRA_FP32_ROUNDING = Tolerance(
    rtol=2.0**-23,
    atol=0.0,
    reason="the peer rounds block_scale * global_scale to FP32 before it multiplies the code",
)

FUSED_FINALIZE = Tolerance(
    rtol=2.0**-8,
    atol=2.0**-24,
    reason="FP32 sums in another order may round to the neighbour in BF16",
)

GPU_EXP = Tolerance(
    rtol=2.0**-19,
    atol=2.0**-40,
    reason="a GPU's exp and division are off by a few units in the last place, and a sigmoid of "
    "large magnitude multiplies what its argument was off by",
)

RECIPROCAL_SCALE = Tolerance(
    rtol=2.0**-22,
    atol=0.0,
    reason="an encode scale and a decode scale are reciprocals, each rounded to FP32",
)

SGLANG_FP8_IN_FP16 = Tolerance(
    rtol=2.0**-8,
    atol=2.0**-25,
    reason="where the scale has no dimension SGLang rounds the product to FP16, whose subnormals "
    "are 2**-24 apart, and then to BF16; we round once",
)

SUM_ORDER = Tolerance(
    rtol=2.0**-16,
    atol=2.0**-17,
    reason="FP32 sums of some hundred terms of size 1, in the order that a product's shape decides",
)


def assert_close(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Compare within a named tolerance; the failure quotes its reason."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        msg=lambda text: f"{text}\nallowed because {tolerance.reason}",
    )
