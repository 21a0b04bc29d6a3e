# SPDX-License-Identifier: Apache-2.0
"""4-over-6: two candidate scales for a block, and the one with the smaller error wins.

E2M1 has nothing between 4 and 6. A block whose largest elements lie there when 6 is the top is
better off with a scale 1.5 times as large, which maps its largest element to 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrarch.numerics.contract import Recipe
from tetrarch.numerics.e2m1 import E2M1_MAX, round_to_e2m1
from tetrarch.numerics.fp8 import round_to_e4m3
from tetrarch.numerics.scales import FP32_MAX, divide

__all__ = ["element_scale", "round_4over6"]


def element_scale(block_scale: Tensor, decode_scale: Tensor) -> Tensor:
    """Return what a block's elements are multiplied by: `1 / (block_scale * decode_scale)`.

    At most FP32's largest number, so that a block scale of zero keeps zeros zero.
    """
    return (block_scale * decode_scale).reciprocal_().clamp_(max=FP32_MAX)


def round_4over6(
    blocks: Tensor,
    amax: Tensor,
    *,
    scale: tuple[Tensor, Tensor],
    recipe: Recipe,
    row_amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Round blocks under the better of two scales; a tie keeps 6.

    Args:
        blocks: (R, B, 16) fp32.
        amax: (R, B, 1) fp32, largest magnitude of each block.
        scale: Encode scale and decode scale, both (1,) or (R, 1, 1) fp32.
        recipe: Which error to compare, and the top of the scale range.
        row_amax: (R, 1, 1) fp32 where there is a scale for each row, else `None`.

    Returns:
        numbers: (R, B, 16) fp32, E2M1 values. A block of zeros gets +0 throughout.
        scales: (R, B, 1) fp32, E4M3 values.

    Source: FlashInfer 0.6.18 `ref_fp4_quant_4over6_te`, bytes checked in all 16 variants.
    """
    encode_scale, decode_scale = scale
    base = divide(amax, E2M1_MAX) * encode_scale
    numbers: list[Tensor] = []
    scales: list[Tensor] = []
    errors: list[Tensor] = []
    for stretch in (1.0, 1.5):
        candidate = round_to_e4m3(base * stretch).float()
        rounded = round_to_e2m1(blocks * element_scale(candidate, decode_scale))
        decoded = rounded * candidate
        if recipe.half_error:
            # The kernel's product is FP16; it is exact there, and so in FP32.
            error = decoded.sub_(blocks * encode_scale)
        elif row_amax is None:
            error = decoded.mul_(decode_scale).sub_(blocks)
        else:
            decoded.mul_(row_amax)
            error = divide(decoded, E2M1_MAX * recipe.e4m3_max).sub_(blocks)
        numbers.append(rounded)
        scales.append(candidate)
        errors.append(_in_order(error.abs_() if recipe.error == "mae" else error.square_()))
    takes_four = errors[1] < errors[0]
    # Select by multiplying, exact on halves up to 6: seven times as fast as `where` on a CPU.
    six, four = numbers
    chosen = four.sub_(six).mul_(takes_four).add_(six).copysign_(six)
    # -0 + 0 is +0, -0 + -0 stays: only blocks of zeros lose their signs.
    chosen.add_(torch.where(amax == 0, 0.0, -0.0))
    return chosen, torch.where(takes_four, scales[1], scales[0])


def _in_order(terms: Tensor) -> Tensor:
    """Sum (R, B, 16) to (R, B, 1) from left to right, one FP32 rounding an addition."""
    first, *others = terms.split(1, dim=-1)
    total = first.clone()
    for term in others:
        total += term
    return total
