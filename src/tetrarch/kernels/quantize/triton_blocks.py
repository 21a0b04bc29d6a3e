# SPDX-License-Identifier: Apache-2.0
"""Sixteen neighbours and their scale in Triton: what kernels that round to NVFP4 are made of.

Rounding to E4M3 and E2M1 is FP32 addition (`round_to_e4m3`, `round_to_e2m1`), which every GPU has,
so that no architecture needs code of its own. Each operation must be rounded by itself, as the
reference does: kernels are launched without floating-point fusion, divisions are `div_rn`, and
the few fused operations here have exact products.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Device functions take what they touch as untyped arguments, compile-time constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "code_words",
    "e4m3_bytes",
    "round_halves",
    "round_tile",
    "round_to_e2m1",
    "round_to_e4m3",
]


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to_e4m3(magnitudes):
    """Round magnitudes to E4M3, ties to even, saturating; NaN stays. See `round_to_e2m1`.

    Neighbours are 1/8 of the power of two below them apart, and never less than 2**-9.
    """
    capped = tl.minimum(magnitudes, 448.0)
    exponent = capped.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent, 0x3C800000).to(tl.float32, bitcast=True)  # at least 2**-6
    rounded = tl.fma(power, -1572864.0, tl.fma(power, 1572864.0, capped))  # 1.5 * 2**20
    return tl.where(magnitudes == magnitudes, rounded, magnitudes)


@triton.jit
def _round_to_e2m1(magnitudes):
    """Round magnitudes to E2M1, ties to even, saturating; NaN becomes 6. Also return sums.

    `numerics.e2m1` says why adding and subtracting a number rounds. The number is 2**22 + 3 of the
    power of two below: the sum's last bits are 6 more than the halves of the power, and its
    exponent's are 2 more than twice the power's, modulo 8. Together they are the code.
    """
    capped = tl.minimum(magnitudes, 6.0)  # of a number and NaN it is the number
    exponent = capped.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(exponent, 0x3F800000).to(tl.float32, bitcast=True)  # at least 1
    sums = tl.fma(power, 4194307.0, capped)
    return tl.fma(power, -4194307.0, sums), sums


@triton.jit
def round_to_e2m1(magnitudes):
    """Round magnitudes to E2M1, ties to even, saturating; NaN becomes 6."""
    rounded, _ = _round_to_e2m1(magnitudes)
    return rounded


@triton.jit
def _with_signs(magnitudes, values, mask):
    """Give magnitudes the signs of values that `mask` lets through; the sign of NaN is plus."""
    sign = tl.minimum(values, float("inf")).to(tl.int32, bitcast=True) & mask
    return (magnitudes.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _element_scale(block_scale, decode_scale):
    """Return `min(1 / (block_scale * decode_scale), FP32's largest)`; NaN stays."""
    inverse = tl.div_rn(1.0, block_scale * decode_scale)
    return tl.minimum(inverse, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scales_of_rows(row_amax, encode_scale, top):
    """Return encode, decode and token scale: as given, or each row's own, with top = 1 / factor."""
    if encode_scale is None:
        own = tl.div_rn(top, row_amax)
        encode = tl.minimum(tl.where(own > 0.0, own, 1.0), 3.4028234663852886e38)
        decode = tl.div_rn(1.0, encode)
        token_scale = tl.where(row_amax == 0.0, 0.0, decode)
    else:
        encode = encode_scale
        decode = tl.div_rn(1.0, encode)
        token_scale = decode
    return encode, decode, token_scale


@triton.jit
def round_tile(values, encode_scale, top):
    """Round a tile of whole rows, with 6 on top of every block.

    Args:
        values: (R, B, 16) fp32; what lies beyond a row's end is NaN, which counts for nothing.
        encode_scale: (R,) fp32, or `None` to give each row its own.
        top: `1 / factor`, read where rows get their own.

    Returns:
        numbers: (R, B, 16) fp32, E2M1 values.
        scales: (R, B) fp32, E4M3 values.
        token_scale: (R,) fp32; the reciprocal of a given encode scale.

    Source: `numerics.blocks`.
    """
    amax = tl.max(tl.abs(values), axis=2)  # NaN where all 16 are
    encode, decode, token_scale = _scales_of_rows(tl.max(amax, axis=1), encode_scale, top)
    scales = round_to_e4m3(amax * (encode * 0.16666667163372040)[:, None])  # fl(1/6)
    scaled = values * _element_scale(scales, decode[:, None])[:, :, None]
    numbers = _with_signs(round_to_e2m1(tl.abs(scaled)), scaled, -0x80000000)
    return numbers, scales, token_scale


@triton.jit
def _over(numerators, odd, DIVISOR: tl.constexpr):
    """Return numerators / DIVISOR, each rounded once; `odd` says that some may be very odd.

    A quotient that is off by its last place at most, the exact rest, the correction (Markstein):
    three instructions, where a division has a dozen and goes a long way round for a zero.
    """
    if odd:
        quotients = tl.div_rn(numerators, DIVISOR)
    else:
        near = numerators * (1.0 / DIVISOR)
        quotients = tl.fma(tl.fma(near, -DIVISOR, numerators), 1.0 / DIVISOR, near)
    return quotients


@triton.jit
def _candidate(values, scales, row, RECIPE: tl.constexpr):
    """Return, for half a block, what was rounded, results, their sums, and terms of the error.

    `row` is the encode and the decode scale; the largest magnitude where the row has its own, and
    whether that of some row here is so small or large that a rest might not be exact.
    """
    scaled = values * _element_scale(scales, row[1])[:, :, None]
    rounded, sums = _round_to_e2m1(tl.abs(scaled))
    if RECIPE[2]:  # the error of scaled values
        error = tl.fma(rounded, scales[:, :, None], -tl.abs(values * row[0][:, :, None]))
    elif row[2] is None:
        error = rounded * scales[:, :, None] * row[1][:, :, None] - tl.abs(values)
    else:
        decoded = rounded * scales[:, :, None] * row[2][:, :, None]
        error = _over(decoded, row[3], RECIPE[0]) - tl.abs(values)
    return scaled, rounded, sums, tl.abs(error) if RECIPE[1] else error * error


@triton.jit
def _from_left(start, terms):
    """Add (R, B, 8) to (R, B) from left to right, one rounding an addition."""
    even, odd = tl.split(tl.reshape(terms, (terms.shape[0], terms.shape[1], 2, 2, 2)))
    even04, even26 = tl.split(even)
    odd15, odd37 = tl.split(odd)
    term0, term4 = tl.split(even04)
    term1, term5 = tl.split(odd15)
    term2, term6 = tl.split(even26)
    term3, term7 = tl.split(odd37)
    first_four = (((start + term0) + term1) + term2) + term3
    return (((first_four + term4) + term5) + term6) + term7


@triton.jit
def _words(values, sums, amax):
    """Return the codes of (R, B, 8) values whose magnitudes were rounded by way of `sums`."""
    sums = sums.to(tl.uint32, bitcast=True)
    if _INTERPRETED:  # the device's NaN has no sign
        values = tl.minimum(values, float("inf"))
    signs = values.to(tl.uint32, bitcast=True) >> 28
    codes = (sums + (sums >> 22)) & 7 | signs & 0xFFFFFFF8
    words = tl.sum(codes << (tl.arange(0, 8) * 4)[None, None, :], axis=2)
    return words & tl.where(amax == 0.0, 0x77777777, 0xFFFFFFFF)  # zeros lose their signs


@triton.jit
def _signed(values, magnitudes, amax):
    """Return magnitudes with their values' signs."""
    mask = tl.where(amax == 0.0, 0, -0x80000000)[:, :, None]  # a block of zeros loses its signs
    return _with_signs(magnitudes, values, mask)


@triton.jit
def round_halves(left, right, encode_scale, top, RECIPE: tl.constexpr, CODES: tl.constexpr):
    """Round a tile of whole rows, with 6 or 4 on top of a block, whichever errs less; a tie is 6.

    Args:
        left: (R, B, 8) bf16, fp16 or fp32, the first half of each block, and
        right: its second half. Apart, they are in one thread, which adds up errors in their order.
        encode_scale: As for `round_tile`.
        top: As for `round_tile`.
        RECIPE: 6 * e4m3_max, whether the error is mae, and whether it is that of scaled values.
        CODES: Return codes.

    Returns:
        numbers: Twice (R, B, 8) fp32, E2M1 values; or twice (R, B) uint32, eight codes each, the
            first lowest.
        scales: (R, B) fp32, E4M3 values.
        token_scale: (R,) fp32; the reciprocal of a given encode scale.

    Source: `numerics.four_over_six`.
    """
    amax = tl.maximum(tl.max(tl.abs(left), axis=2), tl.max(tl.abs(right), axis=2)).to(tl.float32)
    left, right = left.to(tl.float32), right.to(tl.float32)
    if encode_scale is None or not RECIPE[2]:
        row_amax = tl.max(amax, axis=1)
        odd = (row_amax > 0.0) & ((row_amax < 1e-24) | (row_amax > 1e30))
        odd = tl.max(odd.to(tl.int32), axis=0) != 0
    else:  # nobody asks
        row_amax, odd = encode_scale, False
    encode, decode, token_scale = _scales_of_rows(row_amax, encode_scale, top)
    row = (
        encode[:, None], decode[:, None], row_amax[:, None] if encode_scale is None else None, odd
    )  # fmt: skip
    base = tl.div_rn(amax, 6.0) * encode[:, None]
    scales6, scales4 = round_to_e4m3(base), round_to_e4m3(base * 1.5)
    scaled0, six0, sums60, terms0 = _candidate(left, scales6, row, RECIPE)
    scaled1, six1, sums61, terms1 = _candidate(right, scales6, row, RECIPE)
    error6 = _from_left(_from_left(0.0, terms0), terms1)
    _, four0, sums40, terms0 = _candidate(left, scales4, row, RECIPE)
    _, four1, sums41, terms1 = _candidate(right, scales4, row, RECIPE)
    takes_four = _from_left(_from_left(0.0, terms0), terms1) < error6
    each = takes_four[:, :, None]
    if CODES:
        numbers0 = _words(scaled0, tl.where(each, sums40, sums60), amax)
        numbers1 = _words(scaled1, tl.where(each, sums41, sums61), amax)
    else:
        numbers0 = _signed(scaled0, tl.where(each, four0, six0), amax)
        numbers1 = _signed(scaled1, tl.where(each, four1, six1), amax)
    return numbers0, numbers1, tl.where(takes_four, scales4, scales6), token_scale


@triton.jit
def code_words(numbers):
    """Return the codes of (R, W, 8) E2M1 values, eight in a word, the first lowest: (R, W) int32.

    Times 2**-126 the exponents of E2M1 and FP32 agree, so that codes can be read off.
    """
    bits = (numbers * 1.1754943508222875e-38).to(tl.uint32, bitcast=True)
    nibbles = bits << 6 | bits & 0x80000000  # the code is in the four highest bits
    return tl.sum(nibbles >> (28 - tl.arange(0, 8) * 4)[None, None, :], axis=2)


@triton.jit
def e4m3_bytes(scales):
    """Return the bytes of E4M3 magnitudes: times 2**-120 their exponents and FP32's agree."""
    bits = (scales * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    return tl.where(scales == scales, bits >> 20, 0x7F).to(tl.uint8)
