# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0915
# (See triton_walk.py.)
"""The kernels of paged attention. triton.py launches them and says what they are given.

A *unit* is one span of one short sequence: what a program of `attend_spans` does at a time, for
one KV head and one tile of rows. Every length is read on the device, so that one launch serves
every batch that fits the buffers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tetrarch.kernels.attention.triton_walk import (
    await_launch,
    empty_sum,
    fetch_early,
    finish,
    load_queries,
    merge,
    power,
    query_rows,
    release_launch,
    span,
)

__all__ = ["add_spans", "attend_prompts", "attend_spans", "list_units", "write_rows"]


# What differs from step to step must not lead to another compilation.
_VARYING = ("num_tokens", "num_seqs", "table_stride", "window", "short_q_len", "room")
_UNALIGNED = ("page_table", "kv_lens", "cu_seqlens_q", "write_at", "starts", "units")


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def write_rows(
    key,
    value,
    keys,
    values,
    write_at,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copy TOKENS tokens' keys and values to their slots; a negative slot is skipped."""
    release_launch(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(write_at + token, mask=token < num_tokens, other=-1).to(tl.int64)
    token = token.to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (slot >= 0)[:, None] & (at < GROUPS * DIM)[None, :]
    rows = token[:, None] * key_token_stride + (at // DIM * key_head_stride + at % DIM)[None, :]
    tl.store(
        keys + slot[:, None] * (GROUPS * DIM) + at[None, :],
        tl.load(key + rows, mask=mask, other=0.0),
        mask=mask,
    )
    mask = (slot >= 0)[:, None] & (at < GROUPS * VALUE_DIM)[None, :]
    column = at // VALUE_DIM * value_head_stride + at % VALUE_DIM
    rows = token[:, None] * value_token_stride + column[None, :]
    tl.store(
        values + slot[:, None] * (GROUPS * VALUE_DIM) + at[None, :],
        tl.load(value + rows, mask=mask, other=0.0),
        mask=mask,
    )


@triton.jit
def _first_span(q_len, kv_len, window, SPAN: tl.constexpr):
    """Return the span of the first key that a sequence's first new token sees."""
    return tl.where(window > 0, tl.maximum(kv_len - q_len + 1 - window, 0) // SPAN, 0)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def list_units(
    cu_seqlens_q,
    kv_lens,
    starts,
    units,
    window,
    short_q_len,
    room,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write where each sequence's units start, and a record of every unit.

    A record is 8 numbers, 6 of them in use: sequence, first key, first row of its queries, new
    tokens, keys, whether it is the only one; a program that followed them from table to table
    would wait for memory each time. Program r writes sequence r's; a sequence with more than
    `short_q_len` new tokens, or none, has no units. Units beyond `room` are dropped (the host has
    refused such a batch).
    """
    row = tl.program_id(0)
    begin = 0
    for at in range(0, row + 1, BLOCK):
        other = at + tl.arange(0, BLOCK)
        mask = other <= row
        low = tl.load(cu_seqlens_q + other, mask=mask, other=0)
        q_len = tl.load(cu_seqlens_q + other + 1, mask=mask, other=0) - low
        kv_len = tl.load(kv_lens + other, mask=mask, other=0)
        count = (kv_len + SPAN - 1) // SPAN - _first_span(q_len, kv_len, window, SPAN)
        count = tl.where((q_len > 0) & (q_len <= short_q_len), count, 0)
        begin += tl.sum(tl.where(other < row, count, 0))
    q_len = tl.load(cu_seqlens_q + row + 1) - tl.load(cu_seqlens_q + row)
    kv_len = tl.load(kv_lens + row)
    end = begin
    if (q_len > 0) & (q_len <= short_q_len):
        first = _first_span(q_len, kv_len, window, SPAN)
        count = (kv_len + SPAN - 1) // SPAN - first
        end = begin + count
        for at in range(0, count, BLOCK):
            index = at + tl.arange(0, BLOCK)
            mask = (index < count) & (begin + index < room)
            place = units + 8 * (begin + index)
            tl.store(place, index * 0 + row, mask=mask)
            tl.store(place + 1, (first + index) * SPAN, mask=mask)
            tl.store(place + 2, index * 0 + tl.load(cu_seqlens_q + row), mask=mask)
            tl.store(place + 3, index * 0 + q_len, mask=mask)
            tl.store(place + 4, index * 0 + kv_len, mask=mask)
            tl.store(place + 5, index * 0 + (count == 1), mask=mask)
    if row == 0:
        tl.store(starts, 0)
    tl.store(starts + row + 1, tl.minimum(end, room))


@triton.jit
def _unit(units, unit, room):
    """Return a unit's record; of a unit that does not exist, anything."""
    place = units + 8 * tl.minimum(unit, room - 1)
    row, begin, token_0 = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    return row, begin, token_0, tl.load(place + 3), tl.load(place + 4), tl.load(place + 5)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def attend_spans(
    q,
    q_rotary,
    keys,
    values,
    out,
    partial,
    partial_total,
    partial_top,
    page_table,
    starts,
    units,
    sinks,
    room,
    num_seqs,
    table_stride,
    q_token_stride,
    q_head_stride,
    rotary_token_stride,
    rotary_head_stride,
    scale,
    window,
    short_q_len,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Do every unit: write its sum, or the output where a sequence is one unit."""
    GROUP: tl.constexpr = HEADS // GROUPS
    tiles = (short_q_len * GROUP + M - 1) // M
    each = tiles * GROUPS
    row, begin, token_0, q_len, kv_len, alone = _unit(units, tl.program_id(0) // each, room)
    work = tl.load(starts + num_seqs) * each
    if OVERLAP:  # noqa: SIM102 - the outer one is decided while compiling
        if tl.program_id(0) < work:
            fetch_early(page_table + tl.cast(row, tl.int64) * table_stride + begin // PAGE)
    await_launch(OVERLAP)
    for index in range(tl.program_id(0), work, tl.num_programs(0)):
        following = _unit(units, (index + tl.num_programs(0)) // each, room)
        group = index % GROUPS
        tile = index // GROUPS % tiles
        unit = index // each
        if tile * M < q_len * GROUP:
            token, member, real, lowest, highest = query_rows(tile, q_len, kv_len, M, GROUP)
            head = group * GROUP + member
            position = kv_len - q_len + token
            queries = load_queries(
                q, token_0 + token, head, real, q_token_stride, q_head_stride, DIM, DIM_PAD
            )
            rotary = queries
            if LATENT:
                rotary = load_queries(
                    q_rotary, token_0 + token, head, real, rotary_token_stride,
                    rotary_head_stride, VALUE_DIM, VALUE_PAD,
                )  # fmt: skip
            end = tl.minimum(begin + SPAN, highest + 1)
            first = begin
            if HAS_WINDOW:
                first = tl.maximum(begin, tl.maximum(lowest + 1 - window, 0) // N * N)
            acc, total, top = span(
                queries, rotary, keys + group * DIM, values + group * VALUE_DIM,
                page_table + tl.cast(row, tl.int64) * table_stride, position, lowest, first, end,
                scale, window, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, OUT_PAD, GROUPS, PAGE, M, N,
                LATENT, HAS_WINDOW, PRECISION,
            )  # fmt: skip
            at = tl.arange(0, OUT_PAD)
            mask = real[:, None] & (at < OUT_DIM)[None, :]
            if alone != 0:
                sink = total
                if HAS_SINKS:
                    sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
                result = finish(acc, total, top, sink, HAS_SINKS)
                rows = ((token_0 + token).to(tl.int64) * HEADS + head) * OUT_DIM
                tl.store(
                    out + rows[:, None] + at[None, :], result.to(out.dtype.element_ty), mask=mask
                )
            else:
                rows = (tl.cast(unit, tl.int64) * short_q_len + token) * HEADS + head
                tl.store(partial + (rows * OUT_DIM)[:, None] + at[None, :], acc, mask=mask)
                tl.store(partial_total + rows, total, mask=real)
                tl.store(partial_top + rows, top, mask=real)
        row, begin, token_0, q_len, kv_len, alone = following
    release_launch(OVERLAP)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def add_spans(
    out,
    partial,
    partial_total,
    partial_top,
    kv_lens,
    cu_seqlens_q,
    starts,
    sinks,
    window,
    short_q_len,
    HEADS: tl.constexpr,
    OUT_DIM: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add the sums of a token's spans, in order: some columns of one head of one token.

    `CHUNK` spans are loaded at once. 128 columns fill a warp, four to a thread, so that a thread
    holds a column of all spans, and adds from the first to the last.
    """
    COLUMNS: tl.constexpr = 128
    pieces: tl.constexpr = (OUT_DIM + COLUMNS - 1) // COLUMNS
    row, token, head = tl.program_id(0), tl.program_id(1), tl.program_id(2) // pieces
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    token_0 = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - token_0
    kv_len = tl.load(kv_lens + row)
    await_launch(OVERLAP)
    release_launch(OVERLAP)
    if (count > 1) & (token < q_len):
        last = (kv_len - q_len + token) // SPAN
        count = tl.minimum(count, last + 1 - _first_span(q_len, kv_len, window, SPAN))
        at = tl.program_id(2) % pieces * COLUMNS + tl.arange(0, COLUMNS)
        mask = at < OUT_DIM
        place = (start.to(tl.int64) * short_q_len + token) * HEADS + head
        chunk = tl.arange(0, CHUNK)
        rows = place + chunk.to(tl.int64) * (short_q_len * HEADS)
        acc = tl.zeros((COLUMNS,), tl.float32)
        total, top = tl.zeros((32,), tl.float32), float("-inf")
        for first in range(0, count, CHUNK):
            there = first + chunk < count
            tops = tl.load(partial_top + rows, mask=there, other=float("-inf"))
            totals = tl.load(partial_total + rows, mask=there, other=0.0)
            parts = tl.load(
                partial + (rows * OUT_DIM)[:, None] + at[None, :],
                mask=there[:, None] & mask[None, :],
                other=0.0,
            )
            new = tl.maximum(top, tl.max(tops))
            safe = tl.where(new == float("-inf"), 0.0, new)
            old, weights = power(top - safe), power(tops - safe)
            first_row = (chunk == 0)[:, None]
            parts *= weights[:, None]
            acc = tl.sum(tl.where(first_row, (acc * old)[None, :] + parts, parts), 0)
            each = (totals * weights)[:, None]
            each = tl.where(first_row, (total * old)[None, :] + each, each)  # every lane adds alike
            total = tl.sum(each, 0)
            top = new
            rows += CHUNK * short_q_len * HEADS
        total = tl.max(total)
        sink = total
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(top, tl.ceil(sink))
            old = power(top - new)
            acc = acc * old
            total = total * old + tl.exp2(sink - new)
        result = acc / tl.where(total == 0.0, 1.0, total)
        target = ((token_0 + token).to(tl.int64) * HEADS + head) * OUT_DIM
        tl.store(out + target + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def attend_prompts(
    q,
    q_rotary,
    keys,
    values,
    out,
    page_table,
    kv_lens,
    cu_seqlens_q,
    sinks,
    num_seqs,
    table_stride,
    q_token_stride,
    q_head_stride,
    rotary_token_stride,
    rotary_head_stride,
    scale,
    window,
    short_q_len,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    IN_SPANS: tl.constexpr,
):
    """Attend with one tile of a long sequence's rows, for one KV head.

    Sequence r's tiles are numbered from `cu_seqlens_q[r] * GROUP // M + r`, which leaves each at
    least as many as it needs. The last ones, which see most keys, run first.
    """
    GROUP: tl.constexpr = HEADS // GROUPS
    group = tl.program_id(0)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    row = 0
    after = num_seqs
    while after - row > 1:
        middle = (row + after) // 2
        if tl.load(cu_seqlens_q + middle) * GROUP // M + middle <= index:
            row = middle
        else:
            after = middle
    token_0 = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - token_0
    kv_len = tl.load(kv_lens + row)
    tile = index - (token_0 * GROUP // M + row)
    if (q_len > short_q_len) & (tile * M < q_len * GROUP):
        token, member, real, lowest, highest = query_rows(tile, q_len, kv_len, M, GROUP)
        head = group * GROUP + member
        position = kv_len - q_len + token
        queries = load_queries(
            q, token_0 + token, head, real, q_token_stride, q_head_stride, DIM, DIM_PAD
        )
        rotary = queries
        if LATENT:
            rotary = load_queries(
                q_rotary, token_0 + token, head, real, rotary_token_stride, rotary_head_stride,
                VALUE_DIM, VALUE_PAD,
            )  # fmt: skip
        pages = page_table + tl.cast(row, tl.int64) * table_stride
        begin = 0
        end = highest + 1
        if HAS_WINDOW:
            begin = tl.maximum(lowest + 1 - window, 0) // N * N
        if IN_SPANS:
            acc, total, top = empty_sum(M, OUT_PAD)
            for number in range(begin // SPAN, (end + SPAN - 1) // SPAN):
                part, part_total, part_top = span(
                    queries, rotary, keys + group * DIM, values + group * VALUE_DIM, pages,
                    position, lowest, tl.maximum(begin, number * SPAN),
                    tl.minimum(end, number * SPAN + SPAN), scale, window, DIM, VALUE_DIM, DIM_PAD,
                    VALUE_PAD, OUT_PAD, GROUPS, PAGE, M, N, LATENT, HAS_WINDOW, PRECISION,
                )  # fmt: skip
                acc, total, top = merge(acc, total, top, part, part_total, part_top)
        else:
            acc, total, top = span(
                queries, rotary, keys + group * DIM, values + group * VALUE_DIM, pages, position,
                lowest, begin, end, scale, window, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, OUT_PAD,
                GROUPS, PAGE, M, N, LATENT, HAS_WINDOW, PRECISION,
            )  # fmt: skip
        sink = total
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        result = finish(acc, total, top, sink, HAS_SINKS)
        at = tl.arange(0, OUT_PAD)
        rows = ((token_0 + token).to(tl.int64) * HEADS + head) * OUT_DIM
        tl.store(
            out + rows[:, None] + at[None, :],
            result.to(out.dtype.element_ty),
            mask=real[:, None] & (at < OUT_DIM)[None, :],
        )
