# SPDX-License-Identifier: Apache-2.0
"""Paged attention in which a query's bits depend on its own position and keys alone.

Not on the other sequences, nor on how many tokens of its own sequence run beside it, nor on where
its pages are. `reference.py` is the definition of what is computed; here its order is fixed:

* Keys are cut into tiles of 64, the first at position 0, query rows into tiles of 16. One pair of
  tiles is one job, and 8 jobs are one call of a library, always: missing keys, rows and jobs are
  zeros. So every product has the same shape, which is what a library chooses its kernel by; one
  job alone, MKL on two threads adds up 576 elements in another order than among eight.
* A row's largest score is exact in any order. Weights and weighted values are added up tile by
  tile, in order. A tile that a row does not see has weights of exactly 0 and adds exactly 0, so
  it makes no difference whether it is computed.

Letters as in `reference.py`; J key tiles, C = N * G pairs of a sequence and a key head. Everything
is FP32 inside, the result is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tetrarch.core.units import ceil_div
from tetrarch.kernels.attention.reference import (
    Group,
    PagedBatch,
    ScoreRule,
    in_order,
    latent_operands,
    paged_operands,
)
from tetrarch.kernels.matmul.tiled import tiled_bmm

__all__ = ["paged_attention", "paged_latent_attention", "per_head"]

# Microseconds of one job of 64 x 64 keys on one core: 0.9 with 8 rows, 1.8 with 16. A sequence
# that decodes has as many rows as a key head has query heads; a prompt fills every tile.
_ROWS = 16
_KEYS = 64
_JOBS = 8


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, rule: ScoreRule
) -> Tensor:
    """Attend to the pages of each sequence: `reference.paged_attention`, with its arguments."""
    with torch._C.DisableTorchFunction():  # pyright: ignore  # all shapes are fixed here
        operands = paged_operands(query, keys, values, batch)
        return in_order([_attend(*one, rule) for one in operands], batch)


def paged_latent_attention(
    query_latent: Tensor,
    query_rotary: Tensor,
    latents: Tensor,
    rotaries: Tensor,
    batch: PagedBatch,
    rule: ScoreRule,
) -> Tensor:
    """Attend in the latent space of MLA: `reference.paged_latent_attention`, its arguments."""
    with torch._C.DisableTorchFunction():  # pyright: ignore  # all shapes are fixed here
        query = torch.cat((query_latent, query_rotary), dim=-1)
        operands = latent_operands(query, latents, rotaries, batch)
        return in_order([_attend(*one, rule) for one in operands], batch)


def per_head(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's rows by that head's weight: (T, H, K), (H, K, N) -> (T, H, N)."""
    with torch._C.DisableTorchFunction():  # pyright: ignore  # all shapes are fixed here
        return tiled_bmm(rows.transpose(0, 1), weight).transpose(0, 1)


class _Tiling:
    """How a group is cut up: worked out once a step, its memory is used by one layer after another.

    Args:
        group: The sequences.
        heads: G, and H / G.
        widths: D and Dv.
        window: As in `ScoreRule`.
    """

    def __init__(
        self, group: Group, heads: tuple[int, int], widths: tuple[int, int], window: int | None
    ) -> None:
        self.pairs, self.fold = len(group.kv_lens) * heads[0], heads[1]
        self.num_rows = group.q_len * self.fold
        self._num_keys = group.num_keys
        self._shape = (ceil_div(group.num_keys, _KEYS), len(group.kv_lens), heads[0])
        device = group.pages.device
        jobs = self._shape[0] * self.pairs + _JOBS - 1  # any range of jobs can be filled up
        self._keys = torch.zeros(jobs, _KEYS, widths[0], device=device)
        self._values = torch.zeros(jobs, _KEYS, widths[1] + 1, device=device)
        self._values[..., -1] = 1.0  # so that the last column of a product is the sum of weights
        self._query = torch.zeros(jobs, _ROWS, widths[0], device=device)
        self._scores = torch.empty(jobs, _ROWS, _KEYS, device=device)
        self._sums = torch.empty(jobs, _ROWS, widths[1] + 1, device=device)
        ends = torch.tensor(group.kv_lens, device=device)[:, None] - group.q_len
        self._tiles = [
            _Seen.of(window, ends + _token(first, self.fold, group.q_len, device))
            for first in range(0, self.num_rows, _ROWS)
        ]

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Take a layer's keys (N, L, G, D) and values (N, L, G, Dv)."""
        full, rest = divmod(self._num_keys, _KEYS)
        count = self._shape[0] * self.pairs
        for source, tiles in ((keys, self._keys), (values, self._values[..., :-1])):
            target = tiles[:count].unflatten(0, self._shape)  # (J, N, G, 64, D)
            if full:
                cut = source[:, : full * _KEYS].unflatten(1, (full, _KEYS))
                target[:full].copy_(cut.permute(1, 0, 3, 2, 4))
            if rest:
                target[full, :, :, :rest].copy_(source[:, full * _KEYS :].transpose(1, 2))

    def attend(self, rows: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        """Return the weighted values of all rows: (C, rows, D) -> (C, rows, Dv), FP32.

        Args:
            rows: Token after token, within it the heads that share a key head.
            scale: Factor of every score.
            sinks: (C, rows), or `None`.
        """
        out = rows.new_empty(*rows.shape[:2], self._sums.shape[2] - 1, dtype=torch.float32)
        for index, seen in enumerate(self._tiles):
            here = slice(index * _ROWS, (index + 1) * _ROWS)
            own = None if sinks is None else sinks[:, here]
            out[:, here] = self._attend_tile(rows[:, here], seen, scale=scale, sinks=own)
        return out

    def _attend_tile(
        self, rows: Tensor, seen: _Seen, *, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Attend with at most 16 rows of every pair: (C, r, D) -> (C, r, Dv)."""
        num_tiles, num_rows = len(seen.tiles), rows.shape[1]
        jobs = num_tiles * self.pairs
        calls = range(0, jobs, _JOBS)
        first = seen.tiles.start * self.pairs
        by_tile = (num_tiles, self.pairs)

        query = self._query[:jobs].unflatten(0, by_tile)  # (J, C, 16, D); in the rest, whatever was
        query[:, :, :num_rows].copy_(rows)
        for job in calls:
            keys = self._keys[first + job : first + job + _JOBS].mT
            torch.bmm(self._query[job : job + _JOBS], keys, out=self._scores[job : job + _JOBS])
        scores = self._scores[:jobs].mul_(scale).unflatten(0, by_tile)  # (J, C, 16, 64)
        # (J', N, G, 16, 64): what not every row of every sequence sees
        partly = scores[seen.whole :].unflatten(1, (self._shape[1], -1))
        partly.masked_fill_(seen.hidden, float("-inf"))
        # (C, 16), exact in any order; over both dimensions at once it takes 20 times as long
        peak = scores.amax(-1).amax(0)
        if sinks is not None:
            peak[:, :num_rows] = torch.maximum(peak[:, :num_rows], sinks)
        scores.sub_(peak[..., None]).exp_()
        for job in calls:
            values = self._values[first + job : first + job + _JOBS]
            torch.bmm(self._scores[job : job + _JOBS], values, out=self._sums[job : job + _JOBS])

        sums = torch.zeros_like(self._sums[: self.pairs])
        for part in self._sums[:jobs].unflatten(0, by_tile).unbind():
            sums.add_(part)
        sums = sums[:, :num_rows]
        total = sums[..., -1:]
        if sinks is not None:
            total = total + (sinks - peak[:, :num_rows]).exp_()[..., None]
        return sums[..., :-1] / total


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a tile of rows sees, of all sequences."""

    tiles: range  # of keys: those that any row sees
    whole: int  # so many of them, from the first, are seen by all rows
    hidden: Tensor  # (J', N, 1, 16, 64) bool, of the others

    @classmethod
    def of(cls, window: int | None, position: Tensor) -> _Seen:
        """Work it out for the tokens at `position`, (N, 16)."""
        least, most = int(position.min()), int(position.max())
        begin = 0 if window is None else max(least - window + 1, 0) // _KEYS
        tiles = range(begin, most // _KEYS + 1)
        whole = (least + 1) // _KEYS if window is None else 0
        first = (tiles.start + whole) * _KEYS
        key = torch.arange(first, tiles.stop * _KEYS, device=position.device)
        key = key.view(-1, 1, 1, 1, _KEYS)
        own = position[:, None, :, None]  # (N, 1, 16, 1)
        hidden = key > own
        if window is not None:
            hidden |= key <= own - window
        return cls(tiles, whole, hidden)


def _token(first: int, fold: int, q_len: int, device: torch.device) -> Tensor:
    """Return whose token each of 16 rows is; rows past the last see what the last one sees."""
    row = torch.arange(first, first + _ROWS, device=device)
    return row.div_(fold, rounding_mode="floor").clamp_(max=q_len - 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Group, rule: ScoreRule) -> Tensor:
    """Return the weighted values: (N, H, n, D), (N, L, G, D), (N, L, G, Dv) -> (N, H, n, Dv)."""
    num_seqs, num_heads, q_len, width = q.shape
    num_groups, fold = k.shape[2], num_heads // k.shape[2]
    key = ("tiling", num_groups, fold, width, v.shape[-1], rule.window)
    tiling: _Tiling | None = group.memo.get(key)
    if tiling is None:
        widths = (width, v.shape[-1])
        tiling = group.memo[key] = _Tiling(group, (num_groups, fold), widths, rule.window)
    tiling.fill(k, v)
    rows = q.unflatten(1, (num_groups, fold)).transpose(2, 3).reshape(tiling.pairs, -1, width)
    sinks = None
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(num_groups, fold).repeat(num_seqs, q_len)
    out = tiling.attend(rows, rule.scale, sinks)
    out = out.view(num_seqs, num_groups, q_len, fold, -1).transpose(2, 3)
    return out.reshape(num_seqs, num_heads, q_len, -1).to(q.dtype)
