# SPDX-License-Identifier: Apache-2.0
"""NVFP4: E2M1 elements, an E4M3 scale for each 16 of them, an FP32 scale above. The definition.

    value = code * block_scale * scale

The last scale belongs to a tensor, an expert's matrix or a row (`numerics.scales`). All arithmetic
is FP32 with one rounding an operation, subnormals kept, and follows FlashInfer's kernels in their
exact mode bit for bit (`docs/numerics.md`). What is not a number or not finite:

* a magnitude that is NaN does not count towards a block's or a row's largest; its code is +6;
* a block of nothing but NaN has the block scale NaN (0x7F);
* an infinite element makes its block scale 448 and saturates; its row's token scale is 1, and so
  is that of a row of nothing but NaN;
* -0, and a negative that rounds to zero, keep their sign (code 8), except in an all-zero block
  under 4-over-6; a row of zeros has the token scale 0;
* a block scale may round to zero, also in a block that is not all zero: it decodes to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tetrarch.numerics.blocks import (
    check_encoded,
    check_recipe,
    check_values,
    quantize,
    quantize_per_row,
    scaled,
)
from tetrarch.numerics.chunks import by_chunks
from tetrarch.numerics.contract import WEIGHT_RECIPE, Recipe
from tetrarch.numerics.e2m1 import pack, unpack
from tetrarch.numerics.fp8 import E4M3_MAX
from tetrarch.numerics.scales import TOKEN_FACTOR, amax_of, global_scale_from_amax

__all__ = [
    "decode",
    "decode_exact_products",
    "encode",
    "encode_per_token",
    "encode_weight",
    "fake_quant",
    "fake_quant_per_token",
]


def encode(
    values: Tensor,
    *,
    encode_scale: Tensor,
    recipe: Recipe | None = None,
    row_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode as NVFP4 under a given FP32 scale.

    The block scale is rounded to E4M3 before the codes are computed from it, so that they fit the
    scale that the hardware will use.

    Args:
        values: (..., K) bf16, fp16 or fp32; K a multiple of 16.
        encode_scale: () fp32, or (..., 1) with one per row; the reciprocal of a decode scale.
        recipe: 4-over-6, or `None` for the plain block scale `amax / 6`.
        row_amax: (..., 1) fp32, largest magnitude of each row. Only the strict error of a recipe
            reads it, and only where the encode scale is per row.

    Returns:
        codes: (..., K / 2) uint8, two E2M1 codes a byte, element 2i in the low nibble.
        block_scale: (..., K / 16) float8_e4m3fn, linear layout.

    Raises:
        ShapeError: K is not a positive multiple of 16, or `values` is of another dtype.
        ConfigError: There is no such recipe.

    Source: FlashInfer 0.7.4 `batch_invariant/quantization`, golden/flashinfer_*.
    """
    check_values(values)
    check_recipe(recipe)

    def chunk(rows: Tensor, scale: Tensor, largest: Tensor | None) -> tuple[Tensor, ...]:
        numbers, scales = quantize(rows, scale, recipe=recipe, row_amax=largest)
        return pack(numbers).flatten(1), scales.squeeze(-1).to(torch.float8_e4m3fn)

    codes, block_scale = by_chunks(chunk, values, encode_scale, row_amax)
    return codes, block_scale


def encode_per_token(
    values: Tensor, *, factor: float = TOKEN_FACTOR, recipe: Recipe | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode as NVFP4 with a dynamic FP32 scale for each row. No row looks at another.

    Args:
        values: (M, K) bf16, fp16 or fp32; K a multiple of 16.
        factor: What a row's amax is multiplied by to give its token scale: 1/2688 uses the whole
            range of the block scales, 1/1536 belongs to a recipe of 256, and SGLang passes 1 to
            the second GEMM's input.
        recipe: 4-over-6, or `None` for the plain block scale `amax / 6`.

    Returns:
        codes: (M, K / 2) uint8, element 2i in the low nibble.
        block_scale: (M, K / 16) float8_e4m3fn, linear layout.
        token_scale: (M,) fp32, decode scale; 0 for a row of zeros.

    Raises:
        ShapeError: K is not a positive multiple of 16, or `values` is of another dtype.
        ConfigError: There is no such recipe, or it is asked for with another factor than its own,
            under which its strict error would be measured against the wrong scale.

    Source: FlashInfer 0.7.4 per-token quantizer, golden/flashinfer_*, `fi_exact_token*`.
    """
    check_values(values)
    check_recipe(recipe, factor)

    def chunk(rows: Tensor) -> tuple[Tensor, ...]:
        numbers, scales, token_scale = quantize_per_row(rows, factor, recipe=recipe)
        block_scale = scales.squeeze(-1).to(torch.float8_e4m3fn)
        return pack(numbers).flatten(1), block_scale, token_scale

    codes, block_scale, token_scale = by_chunks(chunk, values)
    return codes, block_scale, token_scale.squeeze(-1)


def encode_weight(
    values: Tensor, recipe: Recipe | None = WEIGHT_RECIPE, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode a weight as NVFP4 under a scale of its own.

    Args:
        values: (N, K) bf16, fp16 or fp32; K a multiple of 16.
        recipe: 4-over-6, or `None` for the plain block scale.
        amax: () fp32, `amax_of` all matrices that share the scale (an expert's gate and up);
            `None`: of this one.

    Returns:
        codes: (N, K / 2) uint8, element 2i in the low nibble.
        block_scale: (N, K / 16) float8_e4m3fn, linear layout.
        global_scale: () fp32, decode scale; 1 for a weight of zeros.

    Raises:
        ShapeError: K is not a positive multiple of 16, or `values` is of another dtype.
        ConfigError: There is no such recipe.

    Source: SGLang 0.5.23 `_quantize_weight_nvfp4`, golden/sglang_online_weights.
    """
    values = values.detach()
    check_values(values)
    check_recipe(recipe)
    e4m3_max = recipe.e4m3_max if recipe else int(E4M3_MAX)
    global_scale = global_scale_from_amax(amax_of(values) if amax is None else amax, e4m3_max)
    codes, block_scale = encode(values, encode_scale=global_scale.reciprocal(), recipe=recipe)
    return codes, block_scale, global_scale


def fake_quant(
    values: Tensor,
    *,
    encode_scale: Tensor,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `decode_exact_products(encode(values))` without the detour through bytes.

    Args:
        values: (..., K) bf16, fp16 or fp32; K a multiple of 16.
        encode_scale: () fp32, or (..., 1) with one per row.
        recipe: 4-over-6, or `None`.
        dtype: bf16, fp16 or fp32; the products are exact in each.

    Returns:
        (..., K) of `dtype`: code * block_scale, still to be divided by the encode scale.

    Raises:
        ShapeError: K is not a positive multiple of 16, or `values` is of another dtype.
        ConfigError: There is no such recipe.
    """
    check_values(values)
    check_recipe(recipe)

    def chunk(rows: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        numbers, scales = quantize(rows, scale, recipe=recipe)
        return (numbers.mul_(scales).flatten(1).to(dtype),)

    return by_chunks(chunk, values, encode_scale)[0]


def fake_quant_per_token(
    values: Tensor,
    *,
    factor: float = TOKEN_FACTOR,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return `decode_exact_products` of `encode_per_token` without the detour through bytes.

    Args:
        values: (M, K) bf16, fp16 or fp32; K a multiple of 16.
        factor: As for `encode_per_token`.
        recipe: 4-over-6, or `None`.
        dtype: bf16, fp16 or fp32; the products are exact in each.

    Returns:
        products: (M, K) of `dtype`: code * block_scale.
        token_scale: (M,) fp32; `products * token_scale` is the quantized row.

    Raises:
        ShapeError: K is not a positive multiple of 16, or `values` is of another dtype.
        ConfigError: As for `encode_per_token`.
    """
    check_values(values)
    check_recipe(recipe, factor)

    def chunk(rows: Tensor) -> tuple[Tensor, ...]:
        numbers, scales, token_scale = quantize_per_row(rows, factor, recipe=recipe)
        return numbers.mul_(scales).flatten(1).to(dtype), token_scale

    products, token_scale = by_chunks(chunk, values)
    return products, token_scale.squeeze(-1)


def decode(
    codes: Tensor,
    block_scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode NVFP4: `code * block_scale * global_scale`, one FP32 rounding, then one to `dtype`.

    Args:
        codes: (..., K / 2) uint8, element 2i in the low nibble.
        block_scale: (..., K / 16) float8_e4m3fn, linear layout.
        global_scale: () fp32, or (..., 1) with one per row; `None` for 1.
        dtype: bf16, fp16 or fp32.

    Returns:
        (..., K) of `dtype`.

    Raises:
        ShapeError: The two do not belong together.
    """
    check_encoded(codes, block_scale)

    def chunk(rows: Tensor, scales: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        values = scaled(unpack(rows), scales.float())
        return ((values if scale is None else values.mul_(scale)).to(dtype),)

    return by_chunks(chunk, codes, block_scale, global_scale)[0]


def decode_exact_products(
    codes: Tensor, block_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Decode NVFP4 without its FP32 scale: `code * block_scale`.

    A product has six significant bits and lies between 2**-10 and 2688, so BF16, FP16 and FP32 all
    hold it exactly: what a GEMM on these products lacks is one FP32 factor in its epilogue.

    Args:
        codes: (..., K / 2) uint8, element 2i in the low nibble.
        block_scale: (..., K / 16) float8_e4m3fn, linear layout.
        dtype: bf16, fp16 or fp32.

    Returns:
        (..., K) of `dtype`.

    Raises:
        ShapeError: The two do not belong together.
    """
    check_encoded(codes, block_scale)

    def chunk(rows: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        return (scaled(unpack(rows, dtype), scales.to(dtype)),)

    return by_chunks(chunk, codes, block_scale)[0]
