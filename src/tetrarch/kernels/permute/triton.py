# SPDX-License-Identifier: Apache-2.0
"""Which rows each block of a grouped GEMM takes, and the sum over a token's experts, in Triton.

A *slot* is one (token, expert) pair: token * K + its rank among the token's K experts. Rows stay
in slot order; what is sorted is a list of slots, padded for each expert to whole blocks. Nothing
here waits for the host: lists have room for the worst case, their length is on the device.
"""
# Triton is an optional dependency without usable types: what `@triton.jit` touches is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# Kernels take what they touch as untyped arguments, and compile-time constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0913

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tetrarch.core.units import ceil_div

__all__ = ["Alignment", "align", "finalize"]

# Slots; past them counting takes a launch of its own, which costs less than every program's own.
_COUNTED_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Which slots form which block of a grouped GEMM, for the S slots of one step.

    Lists must have room for `grouped_gemm.tiles.max_blocks` blocks; what lies behind the blocks in
    use is undefined.
    """

    sorted_slots: Tensor  # (blocks * block_tokens,) int32, by expert, then slot; S is padding
    expert: Tensor  # (blocks,) int32, local id of each block's expert
    num_blocks: Tensor  # (1,) int32, blocks in use
    owned: Tensor  # (S,) bool, whether the slot's expert is on this rank
    # (E,) int32, scratch: past 4096 slots experts are counted once, not by every expert's program
    counts: Tensor | None = None


@triton.jit
def _local_experts(topk_ids, slot, num_slots, first_expert):
    """Return the local expert of each slot; a negative number where there is no slot."""
    ids = tl.load(topk_ids + slot, mask=slot < num_slots, other=-1)
    return ids.to(tl.int32) - first_expert


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _count_experts(
    topk_ids,
    counts,
    num_slots,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add a chunk's slots to the counts; sums of integers do not depend on who comes first."""
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    local = _local_experts(topk_ids, slot, num_slots, first_expert)
    mine = (local >= 0) & (local < NUM_EXPERTS)
    found = tl.histogram(tl.where(mine, local, 0), BINS, mask=mine)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + bins, found, mask=(found > 0) & (bins < NUM_EXPERTS), sem="relaxed")


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _align_expert(
    topk_ids,
    sorted_slots,
    experts,
    num_blocks,
    owned,
    totals,
    num_slots,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List one expert's slots. Where nobody has counted, each program counts all experts."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    if totals is not None:
        counts = tl.load(totals + bins, mask=bins < NUM_EXPERTS, other=0)
    else:
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, num_slots, CHUNK):
            local = _local_experts(topk_ids, start + lane, num_slots, first_expert)
            mine = (local >= 0) & (local < NUM_EXPERTS)
            counts += tl.histogram(tl.where(mine, local, 0), BINS, mask=mine)
    for start in range(expert * CHUNK, num_slots, NUM_EXPERTS * CHUNK):  # each program a share
        slot = start + lane
        local = _local_experts(topk_ids, slot, num_slots, first_expert)
        mine = (local >= 0) & (local < NUM_EXPERTS)
        tl.store(owned + slot, mine.to(tl.uint8), mask=slot < num_slots)
    blocks = (counts + TOKENS - 1) // TOKENS
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    end_block = first_block + (count + TOKENS - 1) // TOKENS
    if expert == NUM_EXPERTS - 1:
        tl.store(num_blocks, end_block)
    if count > 0:
        for block in range(first_block, end_block, TOKENS):
            at = block + tl.arange(0, TOKENS)
            tl.store(experts + at, tl.zeros_like(at) + expert, mask=at < end_block)
        row = first_block * TOKENS
        for start in range(0, num_slots, CHUNK):
            slot = start + lane
            local = _local_experts(topk_ids, slot, num_slots, first_expert)
            match = (local == expert).to(tl.int32)
            rank = tl.cumsum(match, axis=0)
            tl.store(sorted_slots + row + rank - 1, slot, mask=match != 0)
            row += tl.sum(match, axis=0)
        padding = row + tl.arange(0, TOKENS)
        tl.store(
            sorted_slots + padding,
            tl.zeros_like(padding) + num_slots,
            mask=padding < end_block * TOKENS,
        )


def align(
    topk_ids: Tensor, *, first_expert: int, num_experts: int, block_tokens: int, out: Alignment
) -> None:
    """Sort slots by expert, each expert's padded to whole blocks; equal experts keep slot order.

    Args:
        topk_ids: (M, K) integer, global expert ids, contiguous. Ids outside
            `first_expert .. first_expert + num_experts - 1` get no row.
        first_expert: Global id of this rank's first expert.
        num_experts: Experts of this rank.
        block_tokens: Rows of a block, a power of two.
        out: Overwritten.
    """
    num_slots, counts = topk_ids.numel(), None
    bins = triton.next_power_of_2(num_experts)
    if out.counts is not None and num_slots > _COUNTED_ONCE:
        counts = out.counts.zero_()
        _count_experts[(ceil_div(num_slots, 2048),)](
            topk_ids,
            counts,
            num_slots,
            first_expert,
            NUM_EXPERTS=num_experts,
            BINS=bins,
            CHUNK=2048,
            num_warps=8,
        )
    chunk = 8192 if num_slots > _COUNTED_ONCE else 2048
    chunk = max(256, min(chunk, triton.next_power_of_2(num_slots)))
    _align_expert[(num_experts,)](
        topk_ids,
        out.sorted_slots,
        out.expert,
        out.num_blocks,
        out.owned.view(torch.uint8),
        counts,
        num_slots,
        first_expert,
        NUM_EXPERTS=num_experts,
        BINS=bins,
        TOKENS=block_tokens,
        CHUNK=chunk,
        num_warps=4 if chunk < 8192 else 8,
    )


@triton.jit
def _finalize_rows(
    rows,
    topk_weights,
    owned,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up one token's rows over `TILE` columns."""
    slot = tl.program_id(0).to(tl.int64) * TOP_K
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < HIDDEN
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(TOP_K):
        keep = tl.load(owned + slot + k) != 0
        weight = tl.load(topk_weights + slot + k, mask=keep, other=0.0)
        row = tl.load(rows + (slot + k) * HIDDEN + column, mask=inside & keep, other=0.0)
        term = row.to(out.dtype.element_ty).to(tl.float32) * weight
        total = term if k == 0 else total + term
    out += tl.program_id(0).to(tl.int64) * HIDDEN
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)


def finalize(rows: Tensor, *, topk_weights: Tensor, owned: Tensor, out: Tensor) -> None:
    """Add up each token's rows: ascending slots, FP32, one rounding an operation, no atomics.

    Args:
        rows: (S, H) in slot order, without routing weights; bf16, fp16 or fp32, contiguous. Wider
            than `out`, they are rounded to its dtype first, as if they had been stored so.
        topk_weights: (M, K) fp32, M * K = S.
        owned: (S,) bool; other rows are not read and add nothing.
        out: (M, H) bf16, fp16 or fp32, overwritten; +0 where a token owns no row.

    Source: `kernels.permute.reference.finalize`, bit for bit.
    """
    num_tokens, hidden = out.shape
    if num_tokens == 0:
        return
    tile = 256 if num_tokens * ceil_div(hidden, 1024) < 264 else 1024
    tile = min(tile, triton.next_power_of_2(hidden))
    _finalize_rows[num_tokens, ceil_div(hidden, tile)](
        rows,
        topk_weights,
        owned.view(torch.uint8),
        out,
        HIDDEN=hidden,
        TOP_K=topk_weights.shape[1],
        TILE=tile,
        num_warps=max(1, tile // 256),
        enable_fp_fusion=False,
    )
