# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM on packed NVFP4 or plain weights in Triton, with what follows it in the epilogue.

Operands are swapped: a tile of weights is the left operand, its rows the wide side, and tokens
are the right one. A weight goes from its code to its BF16 product `code * block_scale` and into
the tensor core without leaving registers, and 16 tokens fill an instruction that 64 rows would
otherwise need.

The product is exact in BF16 and FP16 (`docs/numerics.md`), sums are FP32 along K in steps of 64
columns whatever the tile, and no row looks at another. Then, as the reference orders it:
`sum * (expert scale * row scale) + bias`, each rounded once: kernels run without floating-point
fusion.

Weights decode by FP32 arithmetic, which the interpreter runs too, or by inline PTX where `PTX` is
set: 4 BF16 pairs from 2 words in 15 instructions. Both give the same bits.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, C901, N803, PLR0912, PLR0913, PLR0915

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.core.units import ceil_div
from tetrarch.kernels.grouped_gemm.tiles import Tile, max_blocks
from tetrarch.kernels.permute.triton import Alignment

__all__ = ["Epilogue", "Weight", "grouped_gemm"]


@triton.jit
def _ptx_scales(word):
    """Return the four scales of a word times 2**119, each as a pair of BF16 in an int32.

    The bits are `scale * 2**-120`; times 2**120 (0x7B80), times 2**119 (0x7B00), plus -0.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        and.b32 low, $4, 0x07F007F0;
        shf.l.wrap.b32 high, $4, $4, 8;
        and.b32 high, high, 0x07F007F0;
        fma.rn.bf16x2 low, low, $5, $7;
        fma.rn.bf16x2 high, high, $5, $7;
        fma.rn.bf16x2 low, low, $6, $7;
        fma.rn.bf16x2 high, high, $6, $7;
        prmt.b32 $0, low, low, 0x1010;
        prmt.b32 $1, low, low, 0x3232;
        prmt.b32 $2, high, high, 0x1010;
        prmt.b32 $3, high, high, 0x3232;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [word, 0x7B807B80, 0x7B007B00, -0x7FFF8000],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _ptx_products(words, s0, s1, s2, s3):
    """Return `code * scale * 2**-7` of the four codes of each word, as BF16.

    The bits are `code * 2**-126`, subnormal for code 1; the scales come times 2**119.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, t, zero;
        mov.b32 zero, 0x80008000;
        and.b32 a, $4, 0x81C081C0;
        shl.b32 b, $4, 3;
        and.b32 b, b, 0x81C081C0;
        shl.b32 c, $4, 6;
        and.b32 c, c, 0x81C081C0;
        shl.b32 d, $4, 1;
        and.b32 d, d, 0x80008000;
        shr.u32 t, $4, 3;
        lop3.b32 d, d, t, 0x01800180, 0xF8;
        shr.u32 t, $4, 7;
        lop3.b32 d, d, t, 0x00400040, 0xF8;
        fma.rn.bf16x2 $0, a, $5, zero;
        fma.rn.bf16x2 $1, b, $7, zero;
        fma.rn.bf16x2 $2, c, $9, zero;
        fma.rn.bf16x2 $3, d, $11, zero;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
        [words, s0, s1, s2, s3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _settled(sums):
    """Return sums as they are, once they are there.

    Triton lets the next step's decoding run while the tensor core works, and the compiler gives it
    the very registers that hold the weights being multiplied: it takes them for free. A use of
    the sums in between makes it wait. Seen with Triton 3.6.0 on sm_90 (issue 5): layers replayed
    as a graph differed from time to time; try without when Triton is raised.
    """
    return tl.inline_asm_elementwise(
        "mov.f32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _product(sign, magnitude, scale):
    """Return `code * block_scale` in FP32: the bits are exponents and mantissas, rebased."""
    code = (sign << 31 | magnitude << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return code * ((scale << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36)


@triton.jit
def _plain_products(words, scales):
    """Return `code * block_scale` of the four codes of each word in FP32."""
    w = words.to(tl.int32)
    third = scales >> 28 & 15 | (scales & 7) << 4
    return (
        _product(w >> 15 & 1, w >> 6 & 7, scales >> 4 & 127),
        _product(w >> 12 & 1, w >> 3 & 7, scales >> 20 & 127),
        _product(w >> 9 & 1, w & 7, third),
        _product(w >> 14 & 1, w >> 9 & 6 | w >> 13 & 1, scales >> 12 & 127),
    )


@triton.jit
def decode_tile(words, scales, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decode (Q, R, 16) words under (Q, R) words of scales to an (R, 64 Q) tile of weights."""
    blocks: tl.constexpr = words.shape[0]
    rows: tl.constexpr = words.shape[1]
    if PTX:
        s0, s1, s2, s3 = _ptx_scales(scales)
        w0, w1, w2, w3 = _ptx_products(
            words, s0[:, :, None], s1[:, :, None], s2[:, :, None], s3[:, :, None]
        )
    else:
        w0, w1, w2, w3 = _plain_products(words, scales[:, :, None])
        w0, w1, w2, w3 = w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)
    pairs = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # (Q, R, column, low, high bit of the code)
    return tl.reshape(tl.permute(pairs, (1, 0, 4, 3, 2)), (rows, 64 * blocks))


@triton.jit
def _finish(sums, scale, row_scale, bias, row, token_row, SHIFT: tl.constexpr):
    """Return `sums * (scale * row_scale) + bias` for weight rows (R,) and tokens (M,)."""
    z = sums * SHIFT
    if scale is not None:
        factor = tl.load(scale)
        if row_scale is not None:
            factor *= tl.load(row_scale + token_row)
            z *= factor[None, :]
        else:
            z *= factor
    if bias is not None:
        z += tl.load(bias + row)[:, None]
    return z


@triton.jit
def _swiglu(gate, up, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """See `kernels.activation.reference.swiglu`; `LIMIT` may be `None`."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if BETA != 0.0:
        up += BETA
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * up


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_gemm(
    rows,
    words,
    block_scale,
    scale,
    row_scale,
    bias,
    out,
    topk_weights,
    sorted_slots,
    block_expert,
    num_blocks,
    num_slots,
    SLOTS_PER_ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    N_STORED: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
    PTX: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """Multiply one block of tokens with one tile of its expert's weight."""
    tiles: tl.constexpr = (N_STORED + BLOCK_N - 1) // BLOCK_N
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.load(sorted_slots + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_slot = slot < num_slots
    slot = tl.where(is_slot, slot, 0)  # padding multiplies row 0, and is not stored
    row = slot // SLOTS_PER_ROW
    dtype: tl.constexpr = rows.dtype.element_ty
    width: tl.constexpr = 64 * K_BLOCKS
    stored: tl.constexpr = (K + 63) // 64
    weight_row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, width)
    x = rows + row[:, None].to(tl.int64) * K + column[None, :]
    if block_scale is not None:
        q, lane = tl.arange(0, K_BLOCKS), tl.arange(0, 16)
        at = expert * (stored * N_STORED) + q[:, None] * N_STORED + weight_row[None, :]
        w, s = words + at[:, :, None] * 16 + lane[None, None, :], block_scale + at
    else:
        at = expert * N_STORED + weight_row
        w, s = words + at[:, None] * (64 * stored) + column[None, :], words
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, stored // K_BLOCKS, num_stages=STAGES):
        if K % 64 == 0:
            tokens = tl.load(x)
        else:
            tokens = tl.load(x, mask=(column < K - step * width)[None, :], other=0.0)
        if block_scale is not None:
            weight = decode_tile(tl.load(w), tl.load(s), dtype, PTX)
            w += K_BLOCKS * N_STORED * 16
            s += K_BLOCKS * N_STORED
        else:
            weight = tl.load(w)
            w += width
        sums = tl.dot(weight, tl.trans(tokens), sums, input_precision="ieee")
        if SETTLE:
            sums = _settled(sums)
        x += width
    shift: tl.constexpr = 128.0 if PTX else 1.0  # the products came times 2**-7
    if bias is not None:
        bias += expert * N
    if ACTIVATION == "swiglu":
        n_out: tl.constexpr = N // 2
        half: tl.constexpr = BLOCK_N // 2
        n = tile * half + tl.arange(0, half)
        inside = tl.minimum(n, n_out - 1)
        if scale is not None:
            gate_scale, up_scale = scale + 2 * expert, scale + 2 * expert + 1
        else:
            gate_scale, up_scale = None, None
        up_bias = bias + n_out if bias is not None else None
        pairs = tl.reshape(sums, (BLOCK_N // 16, 2, 8, BLOCK_M))  # 8 rows of gate, 8 of up
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (half, BLOCK_M)), tl.reshape(up, (half, BLOCK_M))
        gate = _finish(gate, gate_scale, row_scale, bias, inside, row, shift)
        up = _finish(up, up_scale, row_scale, up_bias, inside, row, shift)
        z = _swiglu(gate, up, ALPHA, BETA, LIMIT)
    else:
        n_out: tl.constexpr = N
        n = weight_row
        if scale is not None:
            scale += expert
        z = _finish(sums, scale, row_scale, bias, tl.minimum(n, N - 1), row, shift)
        if ACTIVATION == "relu2":
            z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
            z = z * z
    mask = is_slot[None, :] & (n < n_out)[:, None]
    if topk_weights is not None:
        at = out + (slot // TOP_K)[None, :].to(tl.int64) * n_out + n[:, None]
        z = z.to(ROUND).to(tl.float32) * tl.load(topk_weights + slot)[None, :]
        tl.atomic_add(at, z, mask=mask, sem="relaxed")
    else:
        at = out + slot[None, :].to(tl.int64) * n_out + n[:, None]
        tl.store(at, z.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix of all experts, as `packing` stores it."""

    words: Tensor  # (E, K / 64, N, 16) int16 of codes, or (E, N, K) of the rows' dtype; padded
    block_scale: Tensor | None  # (E, K / 64, N) int32; `None`: not quantized
    scale: Tensor | None  # (E, 2 | 1) fp32, gate and up; (E, 1) otherwise
    bias: Tensor | None  # (E, N) fp32, gate before up
    num_rows: int  # N without padding; gate and up alternate as `interleave` has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What becomes of the scaled sums."""

    out: Tensor  # (slots, N), (slots, N / 2) of swiglu; with `topk_weights` (tokens, N) fp32
    activation: str = "none"  # "swiglu" | "relu2"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    topk_weights: Tensor | None = None  # (tokens, top_k) fp32: weigh, and add atomically to `out`
    round_to: torch.dtype = torch.bfloat16  # a row's dtype before it is weighed


_COMPILED = isinstance(_grouped_gemm, triton.JITFunction)  # not interpreted
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def grouped_gemm(
    rows: Tensor,
    weight: Weight,
    *,
    order: Alignment,
    tile: Tile,
    epilogue: Epilogue,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Multiply every slot's row with its expert's weight.

    Args:
        rows: (slots, K), or (tokens, K) shared by a token's slots; bf16, fp16 or fp32.
        weight: Of all experts.
        order: The slots of each block; `tile.tokens` of them.
        tile: As `tile_for` returns it.
        epilogue: Activation, and where results go.
        row_scale: One fp32 for each of `rows`, or `None`.

    Returns:
        `epilogue.out`. Rows of slots that no block holds are left as they are.
    """
    num_slots, after, (num_rows, width) = len(order.owned), epilogue, rows.shape
    if not num_slots:
        return after.out
    blocks = max_blocks(num_slots, len(weight.words), tile.tokens)
    stored = weight.words.shape[1 if weight.block_scale is None else 2]
    tiles = ceil_div(stored, tile.rows)
    _grouped_gemm[(blocks * tiles,)](
        rows,
        weight.words,
        weight.block_scale,
        weight.scale,
        row_scale,
        weight.bias,
        after.out,
        after.topk_weights,
        order.sorted_slots,
        order.expert,
        order.num_blocks,
        num_slots,
        SLOTS_PER_ROW=num_slots // num_rows,
        TOP_K=1 if after.topk_weights is None else after.topk_weights.shape[1],
        N=weight.num_rows,
        N_STORED=stored,
        K=width,
        BLOCK_N=tile.rows,
        BLOCK_M=tile.tokens,
        K_BLOCKS=tile.k_blocks,
        STAGES=tile.stages,
        ACTIVATION=after.activation,
        ALPHA=after.alpha,
        BETA=after.beta,
        LIMIT=None if after.limit == math.inf else after.limit,
        ROUND=_TYPES[after.round_to],
        PTX=tile.ptx,
        SETTLE=_COMPILED and weight.block_scale is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
    return after.out
