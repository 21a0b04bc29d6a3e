# SPDX-License-Identifier: Apache-2.0
"""Paged attention in torch: the definition, and what the CPU runs.

`plan_batch` works out once a step what every layer needs: which pages to read and who sees what.
Sequences with the same number of new tokens and about the same number of pages form a group;
a group is one gather and one attention call, so that decoding costs a few torch calls a layer
and a short sequence is not padded to the longest one.

Letters: T tokens of the flattened batch, H query heads, G heads of keys and values, N sequences
of a group, n new tokens of each, L keys of the longest of them, rounded up to whole pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tetrarch.core.units import ceil_div

__all__ = [
    "Group",
    "PagedBatch",
    "ScoreRule",
    "in_order",
    "latent_operands",
    "paged_attention",
    "paged_latent_attention",
    "paged_operands",
    "per_head",
    "plan_batch",
    "write_",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How queries and keys become weights.

    Attributes:
        scale: Factor of every score.
        window: A query sees itself and the `window - 1` positions before it; `None`: all before.
        sinks: (H,) logit that joins each head's softmax and carries no value.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are computed in one call."""

    rows: slice | Tensor  # their query rows, N * n of them
    pages: Tensor  # (N * P,) int64
    kv_lens: tuple[int, ...]  # N
    q_len: int  # n
    num_keys: int  # L
    _biases: dict[tuple[int | None, torch.dtype], Tensor | None] = field(
        default_factory=dict[tuple[int | None, torch.dtype], Tensor | None]
    )
    _copies: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    memo: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])  # other kernels' own

    def read(self, pool: Tensor, role: str) -> Tensor:
        """Return the group's keys or values, copied out of their pages: (N, L, G, D).

        All layers read into the same memory, one copy for each role: 16 sequences of 300 tokens
        take 35 µs, into fresh memory 160 µs, most of them page faults.
        """
        rows = pool.flatten(1)  # whole pages of a 2-D view; gathering 4-D takes three times as long
        shape = (self.pages.numel(), rows.shape[1])
        copy = self._copies.get(role)
        if copy is None or copy.shape != shape or copy.dtype != pool.dtype:
            copy = self._copies[role] = rows.new_empty(shape)
        torch.index_select(rows, 0, self.pages, out=copy)
        return copy.view(len(self.kv_lens), -1, *pool.shape[2:])[:, : self.num_keys]

    def is_whole_prompt(self, window: int | None) -> bool:
        """Whether every query row sees exactly the rows up to its own."""
        whole = self.q_len > 1 and set(self.kv_lens) == {self.q_len}
        return whole and (window is None or window >= self.q_len)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return 0 for what a query sees and -inf for the rest: (N, 1, n, L), or `None`."""
        if (window, dtype) not in self._biases:
            self._biases[window, dtype] = self._bias(window, dtype)
        return self._biases[window, dtype]

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        reach = self.num_keys if window is None else window
        if self.q_len == 1 and min(self.kv_lens) == self.num_keys <= reach:
            return None
        device = self.pages.device
        ends = torch.tensor(self.kv_lens, device=device)[:, None, None]  # (N, 1, 1)
        query = ends - self.q_len + torch.arange(self.q_len, device=device)[:, None]  # (N, n, 1)
        key = torch.arange(self.num_keys, device=device)
        hidden = (key > query) | (key <= query - reach)
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(hidden, float("-inf")).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step, worked out for the layers."""

    num_tokens: int
    write_at: Tensor  # (T,) int64
    entered: Tensor | None  # pages that get their first rows, and not all of them
    groups: tuple[Group, ...]


def plan_batch(
    page_table: Tensor,
    *,
    write_at: Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
) -> PagedBatch:
    """Work out what every layer of one step needs.

    Args:
        page_table: (R, P) integer page ids; entries past a sequence's last page are not read.
        write_at: (T,) int64, flat slot of each new token: page * page_size + offset.
        q_lens: New tokens of each sequence, at least one; they are its last positions.
        kv_lens: Keys of each sequence, the new ones included.
        page_size: Tokens in a page.
    """
    starts = list(accumulate(q_lens, initial=0))
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        members[q_len, ceil_div(kv_len, page_size).bit_length()].append(row)
    groups: list[Group] = []
    for (q_len, _), rows in members.items():
        lens = tuple(kv_lens[row] for row in rows)
        where = _query_rows([starts[row] for row in rows], q_len, page_table.device)
        pages = _pages(page_table, rows, [ceil_div(n, page_size) for n in lens])
        num_keys = max(lens) if len(rows) == 1 else page_size * (pages.numel() // len(rows))
        groups.append(Group(where, pages, lens, q_len, num_keys))
    entered = _entered(page_table, write_at, q_lens, kv_lens, page_size)
    return PagedBatch(starts[-1], write_at, entered, tuple(groups))


def _query_rows(starts: list[int], q_len: int, device: torch.device) -> slice | Tensor:
    if starts == list(range(starts[0], starts[0] + q_len * len(starts), q_len)):
        return slice(starts[0], starts[-1] + q_len)
    first = torch.tensor(starts, device=device)[:, None]
    return (first + torch.arange(q_len, device=device)).flatten()


def _pages(page_table: Tensor, rows: list[int], counts: list[int]) -> Tensor:
    """Return the group's pages; a short sequence is padded with its own first page.

    Padding is hidden by the bias, but a hidden NaN would still turn a zero weight into NaN, so
    no sequence reads a page that it does not own.
    """
    table = page_table[:, : max(counts)]
    if rows != list(range(len(page_table))):
        table = table[rows]
    if min(counts) < max(counts):
        owned = torch.tensor(counts, device=table.device)[:, None]
        column = torch.arange(max(counts), device=table.device)
        table = torch.where(column < owned, table, table[:, :1])
    return table.flatten().long()


def _entered(
    page_table: Tensor,
    write_at: Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
) -> Tensor | None:
    ends = accumulate(q_lens)
    places = [
        (row, kv_len // page_size, end - kv_len % page_size)
        for row, (q_len, kv_len, end) in enumerate(zip(q_lens, kv_lens, ends, strict=True))
        if 0 < kv_len % page_size <= q_len
    ]
    if not places:
        return None
    rows, columns, firsts = map(list, zip(*places, strict=True))
    pages = page_table[rows, columns].long()
    # A row that only fills a bucket writes elsewhere, and enters nothing.
    return pages[write_at[firsts] == pages * page_size]


def write_(pool: Tensor, values: Tensor, batch: PagedBatch) -> None:
    """Write the step's keys or values into their pages.

    A page that a sequence enters is cleared first: its unwritten tail may hold anything, such
    as the NaN of a request that failed.

    Args:
        pool: (num_pages, page_size, G, D).
        values: (T, G, D).
        batch: The step.
    """
    if batch.entered is not None:
        pool.index_fill_(0, batch.entered, 0)
    pool.flatten(0, 1).index_copy_(0, batch.write_at, values)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, rule: ScoreRule
) -> Tensor:
    """Attend to the pages of each sequence.

    Args:
        query: (T, H, D); H a multiple of G, query head h reads head `h // (H // G)`.
        keys: (num_pages, page_size, G, D), the step's own keys already written.
        values: (num_pages, page_size, G, Dv).
        batch: The step.
        rule: Scale, window and sinks.

    Returns:
        (T, H, Dv) in the query's dtype.
    """
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
    """Attend in the latent space of MLA: every head reads the same compressed keys.

    A key is `[latent, rotary]`, its value is the latent; the caller has multiplied the query by
    the key half of the up-projection and multiplies the result by the value half.

    Args:
        query_latent: (T, H, r).
        query_rotary: (T, H, d).
        latents: (num_pages, page_size, 1, r).
        rotaries: (num_pages, page_size, 1, d).
        batch: The step.
        rule: Scale, window and sinks.

    Returns:
        (T, H, r) in the query's dtype.
    """
    query = torch.cat((query_latent, query_rotary), dim=-1)
    operands = latent_operands(query, latents, rotaries, batch)
    return in_order([_attend(*one, rule) for one in operands], batch)


def per_head(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's rows by that head's weight: (T, H, K), (H, K, N) -> (T, H, N)."""
    return torch.einsum("thk,hkn->thn", rows, weight)


def paged_operands(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch
) -> Iterator[tuple[Tensor, Tensor, Tensor, Group]]:
    """Yield each group's queries (N, H, n, D), keys (N, L, G, D) and values (N, L, G, Dv).

    The next group's keys may lie where this one's did.
    """
    for group in batch.groups:
        yield (
            _queries_of(query, group),
            group.read(keys, "key"),
            group.read(values, "value"),
            group,
        )


def latent_operands(
    query: Tensor, latents: Tensor, rotaries: Tensor, batch: PagedBatch
) -> Iterator[tuple[Tensor, Tensor, Tensor, Group]]:
    """Do as `paged_operands` in the latent space of MLA; `query` is (T, H, r + d)."""
    for group in batch.groups:
        latent = group.read(latents, "latent")
        key = torch.cat((latent, group.read(rotaries, "rotary")), dim=-1)
        yield _queries_of(query, group), key, latent, group


def _queries_of(query: Tensor, group: Group) -> Tensor:
    """Return the group's queries: (T, H, D) -> (N, H, n, D)."""
    rows = query[group.rows]
    return rows.unflatten(0, (len(group.kv_lens), group.q_len)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Group, rule: ScoreRule) -> Tensor:
    """Return the weighted values: (N, H, n, D), (N, L, G, D), (N, L, G, Dv) -> (N, H, n, Dv)."""
    if rule.sinks is not None or q.shape[-1] != v.shape[-1]:
        return _attend_in_steps(q, k, v, group, rule)
    causal = group.is_whole_prompt(rule.window)
    return F.scaled_dot_product_attention(
        q,
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if causal else group.bias(rule.window, q.dtype),
        is_causal=causal,
        scale=rule.scale,
        enable_gqa=q.shape[1] != k.shape[2],
    )


def _attend_in_steps(q: Tensor, k: Tensor, v: Tensor, group: Group, rule: ScoreRule) -> Tensor:
    """`_attend` for what torch's fused call cannot do: sinks, and values narrower than keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_seqs, num_heads, q_len, _ = q.shape
    folded = q.to(wide).reshape(num_seqs, k.shape[2], -1, q.shape[-1])  # (N, G, H / G * n, D)
    scores = folded @ k.to(wide).permute(0, 2, 3, 1) * rule.scale
    scores = scores.view(num_seqs, num_heads, q_len, -1)
    bias = group.bias(rule.window, wide)
    if bias is not None:
        scores = scores + bias
    if rule.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = rule.sinks.to(wide).view(1, -1, 1, 1).expand(num_seqs, -1, q_len, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    out = weights.reshape(*folded.shape[:3], -1) @ v.to(wide).transpose(1, 2)
    return out.view(num_seqs, num_heads, q_len, -1).to(q.dtype)


def in_order(outputs: list[Tensor], batch: PagedBatch) -> Tensor:
    """Put the groups' rows back in batch order: (N, H, n, D) each -> (T, H, D)."""
    rows = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
    if len(rows) == 1:
        return rows[0]
    merged = rows[0].new_empty(batch.num_tokens, *rows[0].shape[1:])
    for group, value in zip(batch.groups, rows, strict=True):
        merged[group.rows] = value
    return merged
