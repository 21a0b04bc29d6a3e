# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913
# (Triton is optional, and its values have no static types; compile-time values are upper case,
# and a kernel has as many parameters as it has.)
"""What the attention kernels share: one tile of query rows walks over keys in their pages.

Bits. A row's weighted values are the sum, in ascending order, of its *spans* (`SPAN` keys each,
counted from position 0); a span is the sum of its tiles of `N` keys, again in order. Neither
depends on other rows, and a tile that a row does not see adds exact zeros. Running maxima are
whole numbers (base 2), so that rescaling multiplies by a power of two, which is exact: a sum that
was rescaled on its way has the bits of one that knew its maximum from the start. So one walk over
all spans, and spans walked by different programs and added up later, give the same bits. (A term
below 2**-126 of the row's largest is the exception: it may vanish.)

The kernels are compiled without floating-point fusion, which the compiler might do in one of them
and not in the other; where it is wanted it is written out.

A tile of `M` rows is `M / GROUP` query positions times the `GROUP` query heads of one KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "await_launch",
    "empty_sum",
    "fetch_early",
    "finish",
    "load_queries",
    "merge",
    "power",
    "query_rows",
    "release_launch",
    "span",
]


@triton.jit
def await_launch(OVERLAP: tl.constexpr):
    """Wait for the launch before this one; before, read nothing that it may have written."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def fetch_early(pointer):
    """Bring a line of memory to the cache; who reads it later need not wait as long."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointer],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def release_launch(OVERLAP: tl.constexpr):
    """Let the next launch's programs take their places, where they wait for this one's end."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def power(exponent):
    """Return 2**exponent of whole numbers <= 0, exactly; 0 below 2**-126."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_rows(tile, q_len, kv_len, M: tl.constexpr, GROUP: tl.constexpr):
    """Return of each row of a tile: token in its sequence, head in its group, whether it is real.

    Also the lowest and the highest position that a row of the tile has.
    """
    row = tile * M + tl.arange(0, M)
    lowest = kv_len - q_len + tile * M // GROUP
    highest = kv_len - q_len + tl.minimum((tile * M + M - 1) // GROUP, q_len - 1)
    return row // GROUP, row % GROUP, row < q_len * GROUP, lowest, highest


@triton.jit
def load_queries(
    q, token, head, real, token_stride, head_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr
):
    """Return a tile's queries, (M, DIM_PAD); zero where there are none."""
    at = tl.arange(0, DIM_PAD)
    rows = token.to(tl.int64) * token_stride + head * head_stride
    return tl.load(
        q + rows[:, None] + at[None, :], mask=real[:, None] & (at < DIM)[None, :], other=0.0
    )


@triton.jit
def empty_sum(M: tl.constexpr, OUT_PAD: tl.constexpr):
    """Return the sum over no keys: weighted values, weights, and exponent."""
    acc = tl.zeros((M, OUT_PAD), tl.float32)
    return acc, tl.zeros((M,), tl.float32), tl.full((M,), float("-inf"), tl.float32)


@triton.jit
def merge(acc, total, top, part, part_total, part_top):
    """Return the first sum with the second one added behind it."""
    new = tl.maximum(top, part_top)
    safe = tl.where(new == float("-inf"), 0.0, new)
    old, more = power(top - safe), power(part_top - safe)
    acc = acc * old[:, None] + part * more[:, None]
    return acc, total * old + part_total * more, new


@triton.jit
def finish(acc, total, top, sink, HAS_SINKS: tl.constexpr):
    """Return the rows' outputs; `sink` is each row's, in base 2."""
    if HAS_SINKS:
        new = tl.maximum(top, tl.ceil(sink))
        old = power(top - new)
        acc = acc * old[:, None]
        total = total * old + tl.exp2(sink - new)
    total = tl.where(total == 0.0, 1.0, total)  # rows that are not real see nothing
    return acc / total[:, None]


@triton.jit
def _slots(pages, start, first, end, PAGE: tl.constexpr, N: tl.constexpr):
    """Return where in the pool the N positions from `start` lie.

    That is the slot of the first one where a page holds the tile, (N,) slots otherwise. Only
    positions from `first` to `end` are looked up, the others' slots mean nothing.
    """
    if PAGE % N == 0:
        page = tl.load(pages + start // PAGE, mask=start < end, other=0)
        return page.to(tl.int64) * PAGE + start % PAGE
    else:  # noqa: RET505 - a compile-time branch: the two return different types
        key = start + tl.arange(0, N)
        page = tl.load(pages + key // PAGE, mask=(key >= first) & (key < end), other=0)
        return page.to(tl.int64) * PAGE + key % PAGE


@triton.jit
def _load_rows(
    pool,
    slots,
    inside,
    ROW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return a tile of the pool's rows, (N, DIM_PAD).

    Whatever a page holds outside of `inside` is not loaded: a hidden NaN would turn a weight of
    zero into NaN.
    """
    at = tl.arange(0, DIM_PAD)
    if PAGE % N == 0:
        rows = pool + slots * ROW + (tl.arange(0, N)[:, None] * ROW + at[None, :])
    else:
        rows = pool + slots[:, None] * ROW + at[None, :]
    if MASKED:
        return tl.load(rows, mask=inside[:, None] & (at < DIM)[None, :], other=0.0)
    if DIM_PAD > DIM:
        return tl.load(rows, mask=(at < DIM)[None, :], other=0.0)
    return tl.load(rows)


@triton.jit
def _step(
    acc,
    total,
    top,
    q,
    q_rotary,
    keys,
    values,
    slots,
    position,
    start,
    first,
    end,
    scale,
    window,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the tile of keys that begins at `start`."""
    key = start + tl.arange(0, N)
    inside = (key >= first) & (key < end)
    k = _load_rows(keys, slots, inside, GROUPS * DIM, DIM, DIM_PAD, PAGE, N, MASKED)
    v = _load_rows(values, slots, inside, GROUPS * VALUE_DIM, VALUE_DIM, VALUE_PAD, PAGE, N, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if LATENT:  # the second half of the key; the value is its first half
        scores = tl.dot(q_rotary, tl.trans(v), scores, input_precision=PRECISION)
        v = k
    if MASKED:
        hidden = key[None, :] > position[:, None]
        if HAS_WINDOW:
            hidden = hidden | (key[None, :] <= position[:, None] - window)
        scores = tl.where(hidden, float("-inf"), scores)
    new = tl.maximum(top, tl.ceil(tl.max(scores, 1) * scale))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(tl.fma(scores, scale, -safe[:, None]))
    old = power(top - safe)
    total = total * old + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return acc, total, new


@triton.jit
def span(
    q,
    q_rotary,
    keys,
    values,
    pages,
    position,
    lowest,
    begin,
    end,
    scale,
    window,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the sum over the keys `begin` to `end`; `begin` is a multiple of N.

    q           (M, DIM_PAD); with LATENT the part that meets the latents
    q_rotary    (M, VALUE_PAD), read with LATENT only
    keys        pool, at the tile's KV head; with LATENT of latents
    values      pool, at the tile's KV head; with LATENT of rotary keys
    pages       the sequence's row of the page table
    position    (M,) of each row; `lowest` is the smallest
    scale       of scores, in base 2, positive
    window      how many keys a row sees, its own included; none before are loaded
    """
    acc, total, top = empty_sum(M, OUT_PAD)
    first = 0
    if HAS_WINDOW:
        first = lowest + 1 - window
    # The next tile's slots are looked up one round ahead: left to itself, Triton's pipeline spends
    # half of its stages on the lookup.
    slots = _slots(pages, begin, first, end, PAGE, N)
    plain = begin
    if not HAS_WINDOW:
        plain = tl.maximum(begin, tl.minimum(end, lowest + 1) // N * N)  # all see all keys before
        for start in range(begin, plain, N):
            following = _slots(pages, start + N, first, end, PAGE, N)
            acc, total, top = _step(
                acc, total, top, q, q_rotary, keys, values, slots, position, start, first, end,
                scale, window, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, GROUPS, PAGE, N, LATENT,
                HAS_WINDOW, PRECISION, False,
            )  # fmt: skip
            slots = following
    for start in range(plain, end, N):
        following = _slots(pages, start + N, first, end, PAGE, N)
        acc, total, top = _step(
            acc, total, top, q, q_rotary, keys, values, slots, position, start, first, end,
            scale, window, DIM, VALUE_DIM, DIM_PAD, VALUE_PAD, GROUPS, PAGE, N, LATENT,
            HAS_WINDOW, PRECISION, True,
        )  # fmt: skip
        slots = following
    return acc, total, top
