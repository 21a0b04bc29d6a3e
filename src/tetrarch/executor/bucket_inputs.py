# SPDX-License-Identifier: Apache-2.0
"""The tensors that captured forwards read, and how a batch gets there without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tetrarch.attention.types import AttentionInputs
from tetrarch.core.specs import TensorSpec
from tetrarch.executor.buckets import AnyBucket, Bucket, Layout, PromptBucket, lay_out
from tetrarch.executor.transfer import upload
from tetrarch.memory.slots import SlotTable

__all__ = ["BucketInputs", "Rows", "SparePage"]

_INT32 = torch.int32


@dataclass(frozen=True, slots=True)
class SparePage:
    """A page that no sequence owns: what is written there is never read."""

    index: int
    page_size: int

    def slots(self, count: int) -> Tensor:
        """Return where so many rows may write; (count,) int64."""
        return torch.arange(count) % self.page_size + self.index * self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What `Model.forward` and `Model.draft_forward` are given, but for the pool."""

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    attn: AttentionInputs
    logits_at: Tensor  # (L,) int64
    hidden: Tensor | None = None  # (T, H), for the draft


class BucketInputs:
    """One set for all buckets: each reads the first rows.

    Args:
        buckets: Whom it serves.
        pages_per_seq: Columns of the page table.
        hidden: (H,) and dtype of what the draft reads; `None` without one.
        spare: Where rows write that are there for the shape alone.
        slots: Gets the tensors.
        device: Where they shall be.
    """

    def __init__(
        self,
        buckets: Sequence[AnyBucket],
        *,
        pages_per_seq: int,
        hidden: TensorSpec | None,
        spare: SparePage,
        slots: SlotTable,
        device: torch.device,
    ) -> None:
        rows = max(bucket.num_rows for bucket in buckets)
        seqs = max(bucket.num_seqs for bucket in buckets)

        def allocate(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return slots.allocate(name, TensorSpec(shape, dtype, device))

        self.pages_per_seq, self._spare = pages_per_seq, spare
        self._token_ids = allocate("token_ids", rows)
        self._positions = allocate("positions", rows)
        self._write_at = allocate("write_at", rows)
        self._logits_at = allocate("logits_at", rows)
        self._spare_slots = allocate("spare_slots", rows).copy_(spare.slots(rows))
        self._kv_lens = allocate("kv_lens", seqs, dtype=_INT32)
        self._page_table = allocate("page_table", seqs, pages_per_seq, dtype=_INT32)
        self._cu_seqlens = {
            q_len: allocate(f"cu_seqlens of {q_len}", seqs + 1, dtype=_INT32).copy_(
                torch.arange(seqs + 1) * q_len
            )
            for q_len in sorted({b.q_len for b in buckets if isinstance(b, Bucket)})
        }
        self._cu_prompts = allocate("cu_seqlens of prompts", seqs + 1, dtype=_INT32)
        self._hidden = None
        if hidden is not None:
            self._hidden = allocate("hidden", rows, *hidden.shape, dtype=hidden.dtype)
        self._q_lens_host: tuple[int, ...] = ()
        self._kv_lens_host: tuple[int, ...] = ()

    def rows(self, bucket: AnyBucket, *, num_logits: int) -> Rows:
        """Return what the bucket's forward reads, now and at every replay."""
        count, seqs = bucket.num_rows, bucket.num_seqs
        is_prompts = isinstance(bucket, PromptBucket)
        cu_seqlens = self._cu_prompts if is_prompts else self._cu_seqlens[bucket.q_len]
        return Rows(
            token_ids=self._token_ids[:count],
            positions=self._positions[:count],
            attn=AttentionInputs(
                write_at=self._write_at[:count],
                cu_seqlens_q=cu_seqlens[: seqs + 1],
                kv_lens=self._kv_lens[:seqs],
                page_table=self._page_table[:seqs],
                q_lens=self._q_lens_host,
                kv_lens_host=self._kv_lens_host,
            ),
            logits_at=self._logits_at[:num_logits],
            hidden=None if self._hidden is None else self._hidden[:count],
        )

    def fill_idle(self, bucket: AnyBucket) -> None:
        """Put in sequences that begin and end with this step, all in the spare page.

        Prompts are a short one and a long one, so that whatever attends to either is captured.
        """
        count, seqs = bucket.num_rows, bucket.num_seqs
        lens = (1, count - 1) if isinstance(bucket, PromptBucket) else (bucket.q_len,) * seqs
        ends = torch.tensor(lens).cumsum(0)
        for tensor in (self._token_ids, self._positions, self._logits_at, self._hidden):
            if tensor is not None:
                tensor.zero_()
        self._write_at.copy_(self._spare_slots)
        self._kv_lens.zero_()[: len(lens)].copy_(torch.tensor(lens))
        self._cu_prompts.fill_(count)[0].zero_()
        self._cu_prompts[1 : len(lens) + 1].copy_(ends)
        self._page_table.fill_(self._spare.index)
        self._q_lens_host = self._kv_lens_host = lens

    def fill(self, bucket: AnyBucket, rows: Rows, *, num_logits: int) -> Tensor | None:
        """Put in a batch, spread over the bucket. Nothing waits for the device.

        Returns:
            (T,) row of the bucket of each row of the batch; `None`: its own index.
        """
        row_of = None
        if isinstance(bucket, PromptBucket):
            self._fill_up(bucket, rows)
        else:
            layout = lay_out(bucket, rows.attn.q_lens, rows.attn.kv_lens_host)
            if len(layout.row_of) < bucket.num_rows:
                rows, row_of = self._spread(rows, layout)
            self._q_lens_host = (bucket.q_len,) * bucket.num_seqs
            self._kv_lens_host = rows.attn.kv_lens_host
        self._put(rows)
        used = len(rows.logits_at)
        if used < num_logits:
            self._logits_at[used:num_logits].zero_()  # an older, larger batch's rows
        return row_of

    def _put(self, rows: Rows) -> None:
        """Copy a batch to where every bucket's rows begin."""
        count, (seqs, pages) = len(rows.token_ids), rows.attn.page_table.shape
        self._token_ids[:count].copy_(rows.token_ids)
        self._positions[:count].copy_(rows.positions)
        self._write_at[:count].copy_(rows.attn.write_at)
        self._kv_lens[:seqs].copy_(rows.attn.kv_lens)
        self._page_table[:seqs, :pages].copy_(rows.attn.page_table)
        self._logits_at[: len(rows.logits_at)].copy_(rows.logits_at)
        if self._hidden is not None and rows.hidden is not None:
            self._hidden[:count].copy_(rows.hidden)

    def _fill_up(self, bucket: PromptBucket, rows: Rows) -> None:
        """Let one more prompt, of the batch's last token, take the rows that are left."""
        attn, count, end = rows.attn, len(rows.token_ids), bucket.num_rows
        seqs, left = len(attn.q_lens), end - count
        self._cu_prompts[: seqs + 1].copy_(attn.cu_seqlens_q)
        self._cu_prompts[seqs + 1 : bucket.num_seqs + 1].fill_(end)
        self._kv_lens[seqs : bucket.num_seqs].zero_()
        self._q_lens_host, self._kv_lens_host = attn.q_lens, attn.kv_lens_host
        if left == 0:
            return
        self._token_ids[count:end].copy_(rows.token_ids[-1:].expand(left))
        self._positions[count:end].zero_()  # any that a model knows
        self._write_at[count:end].copy_(self._spare_slots[:left])
        self._kv_lens[seqs].fill_(left)
        self._page_table[seqs].fill_(self._spare.index)
        if self._hidden is not None and rows.hidden is not None:
            self._hidden[count:end].copy_(rows.hidden[-1:].expand(left, -1))
        self._q_lens_host, self._kv_lens_host = (*attn.q_lens, left), (*attn.kv_lens_host, left)

    def _spread(self, rows: Rows, layout: Layout) -> tuple[Rows, Tensor | None]:
        """Return the bucket's rows, and where the batch's rows are among them."""
        source, back, is_spare, seqs, row_of = upload(
            rows.token_ids.device,
            *(layout.source, layout.back, layout.is_spare, layout.seqs, layout.row_of),
        )
        attn = rows.attn
        spare = self._spare_slots[: len(source)]
        spread = Rows(
            token_ids=rows.token_ids[source],
            positions=rows.positions[source] - back,
            attn=replace(
                attn,
                write_at=torch.where(is_spare, spare, attn.write_at[source]),
                kv_lens=attn.kv_lens[seqs],
                page_table=attn.page_table[seqs],
                kv_lens_host=tuple(attn.kv_lens_host[seq] for seq in layout.seqs),
            ),
            logits_at=rows.logits_at if layout.is_even else row_of[rows.logits_at],
            hidden=None if rows.hidden is None else rows.hidden[source],
        )
        return spread, None if layout.is_even else row_of
