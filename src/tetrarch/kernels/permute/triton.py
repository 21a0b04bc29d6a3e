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

__all__ = ["Alignment", "align", "counts_size", "finalize"]

# Slots; past them it pays to count in a launch of its own, where each program looks at some slots
# and not at all of them.
_COUNTED_ONCE = 2048
_CHUNK = 64  # slots of one program then


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
    counts: Tensor | None = None  # (`counts_size`,) int32; without them large steps take longer


@triton.jit
def _local_experts(topk_ids, slot, num_slots, first_expert):
    """Return the local expert of each slot; a negative number where there is no slot."""
    ids = tl.load(topk_ids + slot, mask=slot < num_slots, other=-1)
    return ids.to(tl.int32) - first_expert


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _count_chunk(
    topk_ids,
    counts,
    num_slots,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count a chunk's slots of each expert: `counts` is (NUM_EXPERTS, chunks)."""
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    local = _local_experts(topk_ids, slot, num_slots, first_expert)
    mine = (local >= 0) & (local < NUM_EXPERTS)
    found = tl.histogram(tl.where(mine, local, 0), BINS, mask=mine)
    bins = tl.arange(0, BINS)
    at = counts + bins * tl.num_programs(0) + tl.program_id(0)
    tl.store(at, found, mask=bins < NUM_EXPERTS)


@triton.jit(do_not_specialize=["chunks"])
def _rank_chunks(counts, totals, chunks, WIDTH: tl.constexpr):
    """Replace an expert's counts by how many slots it has in the chunks before."""
    counts += tl.program_id(0) * chunks
    total = 0
    for first in range(0, chunks, WIDTH):
        at = first + tl.arange(0, WIDTH)
        found = tl.load(counts + at, mask=at < chunks, other=0)
        tl.store(counts + at, total + tl.cumsum(found, axis=0) - found, mask=at < chunks)
        total += tl.sum(found, axis=0)
    tl.store(totals + tl.program_id(0), total)


@triton.jit(do_not_specialize=["num_slots", "first_expert", "chunks"])
def _place_chunk(
    topk_ids,
    sorted_slots,
    experts,
    num_blocks,
    owned,
    counts,
    totals,
    num_slots,
    first_expert,
    chunks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List a chunk's slots behind those of the chunks before, and one expert's blocks."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins, mask=bins < NUM_EXPERTS, other=0)
    blocks = (total + TOKENS - 1) // TOKENS
    first_blocks = tl.cumsum(blocks, axis=0) - blocks
    if chunk < chunks:
        lane = tl.arange(0, CHUNK)
        slot = chunk * CHUNK + lane
        local = _local_experts(topk_ids, slot, num_slots, first_expert)
        mine = (local >= 0) & (local < NUM_EXPERTS)
        tl.store(owned + slot, mine.to(tl.uint8), mask=slot < num_slots)
        same = (local[None, :] == local[:, None]) & (lane[None, :] < lane[:, None])
        row = tl.sum(same.to(tl.int32), axis=1)
        row += tl.load(counts + local * chunks + chunk, mask=mine, other=0)
        row += tl.gather(first_blocks, tl.where(mine, local, 0), 0) * TOKENS
        tl.store(sorted_slots + row, slot, mask=mine)
    if chunk < NUM_EXPERTS:
        count = tl.sum(tl.where(bins == chunk, total, 0), axis=0)
        first_block = tl.sum(tl.where(bins == chunk, first_blocks, 0), axis=0)
        _close_expert(sorted_slots, experts, chunk, first_block, count, num_slots, TOKENS)
    if chunk == 0:
        tl.store(num_blocks, tl.sum(blocks, axis=0))


@triton.jit
def _close_expert(
    sorted_slots, experts, expert, first_block, count, num_slots, TOKENS: tl.constexpr
):
    """Name an expert's blocks, and fill the last one up."""
    end_block = first_block + (count + TOKENS - 1) // TOKENS
    for block in range(first_block, end_block, TOKENS):
        at = block + tl.arange(0, TOKENS)
        tl.store(experts + at, tl.zeros_like(at) + expert, mask=at < end_block)
    padding = first_block * TOKENS + count + tl.arange(0, TOKENS)
    mask = padding < end_block * TOKENS
    tl.store(sorted_slots + padding, tl.zeros_like(padding) + num_slots, mask=mask)


@triton.jit(do_not_specialize=["num_slots", "first_expert"])
def _align_expert(
    topk_ids,
    sorted_slots,
    experts,
    num_blocks,
    owned,
    num_slots,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List one expert's slots; each program counts all experts."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
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
    if expert == NUM_EXPERTS - 1:
        tl.store(num_blocks, first_block + (count + TOKENS - 1) // TOKENS)
    if count > 0:
        row = first_block * TOKENS
        for start in range(0, num_slots, CHUNK):
            slot = start + lane
            local = _local_experts(topk_ids, slot, num_slots, first_expert)
            match = (local == expert).to(tl.int32)
            rank = tl.cumsum(match, axis=0)
            tl.store(sorted_slots + row + rank - 1, slot, mask=match != 0)
            row += tl.sum(match, axis=0)
        _close_expert(sorted_slots, experts, expert, first_block, count, num_slots, TOKENS)


def counts_size(num_slots: int, num_experts: int) -> int:
    """Return how many counts a step of so many slots needs at most."""
    return num_experts * (1 + ceil_div(num_slots, _CHUNK))


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
    num_slots = topk_ids.numel()
    lists = (out.sorted_slots, out.expert, out.num_blocks, out.owned.view(torch.uint8))
    sizes = dict(NUM_EXPERTS=num_experts, BINS=max(16, triton.next_power_of_2(num_experts)))
    if out.counts is not None and num_slots > _COUNTED_ONCE:
        chunks = ceil_div(num_slots, _CHUNK)
        totals, counts = out.counts[:num_experts], out.counts[num_experts:]
        _count_chunk[(chunks,)](
            topk_ids, counts, num_slots, first_expert, **sizes, CHUNK=_CHUNK, num_warps=4
        )
        _rank_chunks[(num_experts,)](counts, totals, chunks, WIDTH=1024, num_warps=4)
        _place_chunk[(max(chunks, num_experts),)](
            topk_ids,
            *lists,
            counts,
            totals,
            num_slots,
            first_expert,
            chunks,
            **sizes,
            TOKENS=block_tokens,
            CHUNK=_CHUNK,
            num_warps=4,
        )
        return
    chunk = max(256, min(2048, triton.next_power_of_2(num_slots)))
    _align_expert[(num_experts,)](
        topk_ids,
        *lists,
        num_slots,
        first_expert,
        **sizes,
        TOKENS=block_tokens,
        CHUNK=chunk,
        num_warps=4,
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
