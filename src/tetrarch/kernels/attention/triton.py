# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false
# (Triton is optional; a kernel is launched by indexing it with its grid, which it has no type for.)
"""Paged attention in Triton; reference.py says what it computes.

Sequences with few new tokens (decode, verify) are cut into spans of a fixed number of keys, which
programs of one launch take in turn and a second launch adds up; the others are prompts, a program
for each tile of rows. Which way a sequence goes, and where its spans lie, depends on its own
lengths, so a row has the same bits whatever is in the batch with it.

Nothing here waits for the device or allocates, but for the output. Lengths are read on the device:
a CUDA graph replays with other lengths in the same tensors.

Pages are not cleared. The kernels load no position that a sequence does not have, so what a page
holds beyond its owner's last token, and what freed pages hold, never enters a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tetrarch.core.errors import CapacityExceeded, ShapeError
from tetrarch.core.specs import TensorSpec
from tetrarch.core.units import ceil_div
from tetrarch.kernels.attention.reference import ScoreRule
from tetrarch.kernels.attention.tiles import prompt_tile, shared_room, span_tile, sum_chunk
from tetrarch.kernels.attention.triton_kernels import (
    add_spans,
    attend_prompts,
    attend_spans,
    list_units,
    write_rows,
)

__all__ = [
    "PagedBatch",
    "SplitLimits",
    "limits_for",
    "paged_attention",
    "paged_latent_attention",
    "plan_batch",
    "scratch_specs",
    "units_of",
    "write_",
]

_WINDOWS = 4  # lists of units a step can hold: one for each window size among the layers
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLimits:
    """What the buffers hold, and how the work is cut. One for a model's life.

    Attributes:
        num_seqs: The most sequences of a step.
        num_units: The most spans of all short sequences of a step together (`units_of`).
        short_q_len: Sequences with up to so many new tokens are cut into spans.
        span: Keys of a span, a multiple of every tile. Short spans occupy the GPU with one long
            sequence; their sums cost memory traffic.
        num_programs: Programs that share the units, about two for each multiprocessor.
        shared_bytes: Shared memory that one program may use.
        exact_prompts: Prompts add up their spans too, so that a row has the bits it would have
            had as a decode step, however its prompt was chunked. Costs registers.
        overlap: A launch may start while the one before it still runs (programmatic dependent
            launch, compute capability 9.0 and above).
    """

    num_seqs: int
    num_units: int
    short_q_len: int = 1
    span: int = 512
    num_programs: int = 264
    shared_bytes: int = 232_448
    exact_prompts: bool = False
    overlap: bool = False


def limits_for(device: torch.device, *, num_seqs: int, num_units: int, **cuts: Any) -> SplitLimits:
    """Return the limits for a GPU.

    Args:
        device: The GPU.
        num_seqs: The most sequences of a step.
        num_units: The most spans of all short sequences of a step together.
        cuts: Any other field of `SplitLimits`.
    """
    gpu = torch.cuda.get_device_properties(device)
    return SplitLimits(
        num_seqs=num_seqs,
        num_units=num_units,
        num_programs=2 * gpu.multi_processor_count,
        shared_bytes=shared_room(gpu.major, gpu.shared_memory_per_block_optin),
        overlap=gpu.major >= 9,
        **cuts,
    )


def scratch_specs(
    limits: SplitLimits, *, num_heads: int, out_dim: int, device: torch.device
) -> dict[str, TensorSpec]:
    """Return the buffers that all layers of a model share.

    Args:
        limits: What they must hold.
        num_heads: Query heads, of the layer that has most.
        out_dim: Numbers of a head's output (the rank of MLA's latents), of the widest layer.
        device: Where they live.
    """
    rows = limits.num_units * limits.short_q_len * num_heads
    return {
        "attention.partial": TensorSpec((rows * out_dim,), torch.float32, device),
        "attention.total": TensorSpec((rows,), torch.float32, device),
        "attention.top": TensorSpec((rows,), torch.float32, device),
        "attention.starts": TensorSpec((_WINDOWS, limits.num_seqs + 1), torch.int32, device),
        "attention.units": TensorSpec((_WINDOWS, limits.num_units, 8), torch.int32, device),
    }


def units_of(q_lens: Sequence[int], kv_lens: Sequence[int], limits: SplitLimits) -> int:
    """Return the units of a step: the spans of its short sequences."""
    return sum(
        ceil_div(kv_len, limits.span)
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
        if 0 < q_len <= limits.short_q_len
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """One step, as the kernels read it."""

    page_table: Tensor  # (R, P) int32
    write_at: Tensor  # (T,) int64, negative: the token is written nowhere
    cu_seqlens_q: Tensor  # (R + 1,) int32
    kv_lens: Tensor  # (R,) int32
    page_size: int
    limits: SplitLimits
    scratch: Mapping[str, Tensor]
    has_short: bool
    has_long: bool
    _lists: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def units(self, window: int) -> tuple[Tensor, Tensor, bool]:
        """Return where each sequence's units start, the units, and whether they were listed now.

        They are listed once a step.

        Raises:
            CapacityExceeded: The model's layers have more window sizes than there are buffers.
        """
        if fresh := window not in self._lists:
            if (place := len(self._lists)) == _WINDOWS:
                raise CapacityExceeded(
                    f"a window of {window} tokens is one size too many",
                    why=f"buffers exist for the spans of {_WINDOWS} window sizes",
                    fix="serve another model, or raise _WINDOWS in kernels/attention/triton.py",
                )
            starts = self.scratch["attention.starts"][place]
            units = self.scratch["attention.units"][place]
            list_units[(len(self.kv_lens),)](
                self.cu_seqlens_q,
                self.kv_lens,
                starts,
                units,
                window,
                self.limits.short_q_len,
                self.limits.num_units,
                SPAN=self.limits.span,
                BLOCK=128,
                num_warps=1,
            )
            self._lists[window] = starts, units
        return *self._lists[window], fresh


def plan_batch(  # noqa: PLR0913 - a step has this many parts
    page_table: Tensor,
    *,
    write_at: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_size: int,
    q_lens: Sequence[int],
    kv_lens_host: Sequence[int],
    limits: SplitLimits,
    scratch: Mapping[str, Tensor],
) -> PagedBatch:
    """Take up a step; the device's tensors are those of `AttentionInputs`.

    A sequence may have no new token, and a token no place (padding of a recorded graph); the
    output of such tokens is not written.

    Raises:
        CapacityExceeded: The buffers were sized for less.
    """
    need = units_of(q_lens, kv_lens_host, limits)
    if len(q_lens) > limits.num_seqs or need > limits.num_units:
        raise CapacityExceeded(
            f"a step of {len(q_lens)} sequences and {need} spans of keys",
            why=f"attention's buffers hold {limits.num_seqs} sequences and {limits.num_units} "
            f"spans of {limits.span} keys",
            fix="this is a scheduling bug: admission must respect the limits; report it",
        )
    return PagedBatch(
        page_table=page_table,
        write_at=write_at,
        cu_seqlens_q=cu_seqlens_q,
        kv_lens=kv_lens,
        page_size=page_size,
        limits=limits,
        scratch=scratch,
        has_short=any(0 < q_len <= limits.short_q_len for q_len in q_lens),
        has_long=any(q_len > limits.short_q_len for q_len in q_lens),
    )


def write_(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, batch: PagedBatch) -> None:
    """Write the step's keys and values into their pages.

    Args:
        keys: (num_pages, page_size, G, D), contiguous.
        values: (num_pages, page_size, G, Dv), contiguous.
        key: (T, G, D), the last dimension contiguous.
        value: (T, G, Dv), likewise.
        batch: The step.
    """
    groups, dim, value_dim = keys.shape[2], keys.shape[3], values.shape[3]
    _require_rows(key=key, value=value)
    tokens, block = 4, min(1024, _padded(groups * max(dim, value_dim)))
    grid = (ceil_div(len(key), tokens), ceil_div(groups * max(dim, value_dim), block))
    write_rows[grid](
        key, value, keys, values, batch.write_at, len(key), *key.stride()[:2], *value.stride()[:2],
        GROUPS=groups, DIM=dim, VALUE_DIM=value_dim, TOKENS=tokens, BLOCK=block, num_warps=4,
        OVERLAP=batch.limits.overlap,
    )  # fmt: skip


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, rule: ScoreRule
) -> Tensor:
    """Attend to the pages of each sequence.

    Args:
        query: (T, H, D), the last dimension contiguous; query head h reads head `h // (H // G)`.
        keys: (num_pages, page_size, G, D), the step's own keys already written.
        values: (num_pages, page_size, G, Dv).
        batch: The step.
        rule: Scale, window and sinks.

    Returns:
        (T, H, Dv) in the query's dtype.

    Raises:
        ShapeError: The query's rows are not contiguous.
    """
    return _attend(query, query, keys, values, batch, rule)


def paged_latent_attention(
    query_latent: Tensor,
    query_rotary: Tensor,
    latents: Tensor,
    rotaries: Tensor,
    batch: PagedBatch,
    rule: ScoreRule,
) -> Tensor:
    """Attend in the latent space of MLA: every head reads the same compressed keys.

    Args:
        query_latent: (T, H, r), the last dimension contiguous.
        query_rotary: (T, H, d), likewise.
        latents: (num_pages, page_size, 1, r).
        rotaries: (num_pages, page_size, 1, d).
        batch: The step.
        rule: Scale, window and sinks.

    Returns:
        (T, H, r) in the query's dtype.

    Raises:
        ShapeError: The rows of a query are not contiguous.
    """
    return _attend(query_latent, query_rotary, latents, rotaries, batch, rule)


def _require_rows(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ShapeError(
                f"{name} has a stride of {tensor.stride(-1)} between neighbouring numbers",
                why="the kernel reads rows of contiguous numbers",
                fix="pass it with its last dimension contiguous",
            )


def _attend(
    query: Tensor,
    rotary: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    rule: ScoreRule,
) -> Tensor:
    _require_rows(query=query, rotary=rotary)
    latent = rotary is not query
    (num_tokens, heads, dim), value_dim = query.shape, values.shape[3]
    out_dim = dim if latent else value_dim
    out = query.new_empty(num_tokens, heads, out_dim)
    window = rule.window or 0
    sinks = out if rule.sinks is None else rule.sinks
    limits = batch.limits
    dims = (_padded(dim), _padded(value_dim))
    kind: Any = dict(dtype=query.dtype, latent=latent, shared_bytes=limits.shared_bytes)
    shared: dict[str, Any] = {
        "HEADS": heads,
        "GROUPS": keys.shape[2],
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "OUT_DIM": out_dim,
        "DIM_PAD": dims[0],
        "VALUE_PAD": dims[1],
        "OUT_PAD": _padded(out_dim),
        "PAGE": batch.page_size,
        "SPAN": limits.span,
        "LATENT": latent,
        "HAS_WINDOW": window > 0,
        "HAS_SINKS": rule.sinks is not None,
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
    }
    numbers = (
        len(batch.kv_lens),
        batch.page_table.stride(0),
        *query.stride()[:2],
        *rotary.stride()[:2],
        rule.scale * _LOG2_E,
        window,
        limits.short_q_len,
    )
    lens = (batch.kv_lens, batch.cu_seqlens_q)
    if batch.has_short:
        starts, units, fresh = batch.units(window)
        sums = [batch.scratch[f"attention.{name}"] for name in ("partial", "total", "top")]
        rows = 64 if limits.exact_prompts else limits.short_q_len * (heads // keys.shape[2])
        tile = span_tile(dims, rows=rows, **kind)
        early: dict[str, Any] = {"launch_pdl": True} if limits.overlap else {}
        attend_spans[(limits.num_programs,)](
            query, rotary, keys, values, out, *sums, batch.page_table, starts, units, sinks,
            limits.num_units, *numbers, M=tile.rows, N=tile.keys, num_warps=tile.warps,
            num_stages=tile.stages, enable_fp_fusion=False, OVERLAP=limits.overlap, **shared,
            **({} if fresh else early),  # they must be there before the kernel waits
        )  # fmt: skip
        sums_of = (len(batch.kv_lens), limits.short_q_len, heads)
        add_spans[*sums_of[:2], heads * ceil_div(out_dim, 128)](
            out, *sums, *lens, starts, sinks, window, limits.short_q_len,
            HEADS=heads, OUT_DIM=out_dim, SPAN=limits.span, CHUNK=sum_chunk(math.prod(sums_of)),
            HAS_SINKS=shared["HAS_SINKS"], num_warps=1, enable_fp_fusion=False,
            OVERLAP=limits.overlap, **early,
        )  # fmt: skip
    if batch.has_long:
        tile = prompt_tile(dims, **kind)
        tiles = num_tokens * (heads // keys.shape[2]) // tile.rows + len(batch.kv_lens)
        attend_prompts[(keys.shape[2], tiles)](
            query, rotary, keys, values, out, batch.page_table, *lens, sinks, *numbers,
            M=tile.rows, N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            IN_SPANS=limits.exact_prompts, **shared,
        )  # fmt: skip
    return out


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())
