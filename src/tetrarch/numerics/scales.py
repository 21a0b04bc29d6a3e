# SPDX-License-Identifier: Apache-2.0
"""The second-level scales of NVFP4: one FP32 number per tensor, per expert or per row.

A *decode* scale multiplies codes (`value = code * block_scale * scale`); it is what checkpoints of
ModelOpt store and what this project calls a scale. An *encode* scale multiplies values before they
are rounded. They are reciprocals, each rounded to FP32, so that one cannot be recomputed from the
other: a scale is carried as the number it was made as.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tetrarch.numerics.e2m1 import E2M1_MAX
from tetrarch.numerics.fp8 import E4M3_MAX

__all__ = [
    "FP32_MAX",
    "TOKEN_FACTOR",
    "alpha",
    "amax_of",
    "constant",
    "divide",
    "encode_scale_from_amax",
    "global_scale_from_amax",
    "token_scales",
]

FP32_MAX = torch.finfo(torch.float32).max

# A smaller encode scale than this is no scale: SGLang's guard before it divides by one.
_MIN_ENCODE_SCALE = 1e-12


# 1 / 2688: a row's largest element gets the largest code times the largest block scale.
TOKEN_FACTOR = 1.0 / (E2M1_MAX * E4M3_MAX)


def divide(numerator: Tensor, denominator: float) -> Tensor:
    """Divide by a constant with one rounding on every device.

    `tensor / 6.0` multiplies by the rounded reciprocal on CUDA, which is off by one unit in the
    last place for a quarter of all numerators.
    """
    return numerator / constant(denominator, numerator.device)


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """Return () fp32, kept: torch makes a tensor of a number in every operation, 2 µs on a CPU."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def amax_of(values: Tensor) -> Tensor:
    """Return the largest magnitude of a weight: () fp32.

    NaN counts as zero and an infinity as the dtype's largest number, as SGLang's online
    quantization has it. Zero for an empty tensor.
    """
    if values.numel() == 0:
        return torch.zeros((), device=values.device)
    low, high = torch.aminmax(values)
    largest = torch.maximum(low.abs(), high.abs())
    if bool(largest.isnan()):  # rare enough to pay for a copy of the tensor
        largest = values.abs().nan_to_num_(nan=0.0).amax()
    return largest.nan_to_num(nan=0.0).float()


def encode_scale_from_amax(amax: Tensor, factor: float = TOKEN_FACTOR) -> Tensor:
    """Return the encode scale that maps `amax` to the top of the range: `1 / factor / amax`.

    At most FP32's largest number, which zero gets; 1 where that is not positive: an infinite amax.

    Args:
        amax: Any shape, fp32.
        factor: 1/2688, or `Recipe.token_factor` under 4-over-6.

    Returns:
        The shape of `amax`, fp32.

    Source: FlashInfer 0.6.18 `ref_fp4_quant_te`; golden/sglang_scales_fp8, `te_encode_448`.
    FlashInfer's own `make_nvfp4_global_scale` rounds twice and differs for a quarter of the amax.
    """
    scale = _top(factor, amax.device) / amax
    return torch.threshold_(scale, 0.0, 1.0).clamp_(max=FP32_MAX)


def token_scales(row_amax: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the encode scale of each row and the token scale that undoes it.

    Args:
        row_amax: Any shape, fp32; negative for a row of nothing but NaN.
        factor: As in `encode_scale_from_amax`; 1 gives a token scale of about the amax.

    Returns:
        encode_scale: The shape of `row_amax`, fp32.
        token_scale: Its reciprocal; 0 for a row of zeros.

    Source: FlashInfer 0.7.4, per-token quantizer in exact mode. Its batch-invariant reference
    returns 2.94e-39 for a zero row where its kernel returns 0; the kernel's rule is ours.
    """
    encode_scale = encode_scale_from_amax(row_amax, factor)
    return encode_scale, encode_scale.reciprocal().masked_fill_(row_amax.logical_not(), 0.0)


@cache
def _top(factor: float, device: torch.device) -> Tensor:
    """Return `1 / factor`, both rounded to FP32; 1/2688 and 1/1536 come back as 2688 and 1536.

    A tensor, because torch computes `number / tensor` as `tensor.reciprocal() * number`.
    """
    return constant(factor, device).reciprocal()


def global_scale_from_amax(amax: Tensor, e4m3_max: int = int(E4M3_MAX)) -> Tensor:
    """Return a weight's decode scale, amax / (6 * e4m3_max); 1 where the amax is zero.

    Args:
        amax: Any shape, fp32.
        e4m3_max: 448, or 256 with such a 4-over-6 recipe.

    Returns:
        The shape of `amax`, fp32; `weight_scale_2` in ModelOpt's words.

    Source: SGLang 0.5.23 `_quantize_weight_nvfp4`, golden/sglang_online_weights.
    """
    scale = divide(amax, E2M1_MAX * e4m3_max)
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def alpha(global_scale: Tensor, encode_scale: Tensor) -> Tensor:
    """Return what an accumulator is multiplied by when a static encode scale went in.

    Args:
        global_scale: Any shape, fp32, decode scale of the weight.
        encode_scale: () fp32, what the activations were multiplied by: 1 / input_scale.

    Returns:
        The shape of `global_scale`, fp32; divided, not multiplied by the input scale, so that it
        undoes the number that was really used.

    Source: SGLang 0.5.23 `resolve_cutedsl_standard_scales`, golden/sglang_scales_fp8.
    """
    return global_scale / encode_scale.clamp(min=_MIN_ENCODE_SCALE)
