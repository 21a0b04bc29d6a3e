# SPDX-License-Identifier: Apache-2.0
"""Forwards that were captured once and are replayed: a step costs one launch instead of thousands.

Captured are decode and verify steps, in buckets of sequences, short prefill steps, in buckets of
tokens, and the draft's passes over them; everything else runs as it is. A replay reads the
addresses of its capture, so capture comes after everything is where it stays, and `check` compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.core.progress import Progress
from tetrarch.core.specs import TensorSpec
from tetrarch.executor.bucket_inputs import BucketInputs, Rows, SparePage
from tetrarch.executor.buckets import AnyBucket, Bucket, PromptBucket, choose_bucket
from tetrarch.memory.arena import Arena
from tetrarch.memory.fingerprint import Fingerprints
from tetrarch.memory.slots import SlotTable
from tetrarch.models.build import Forward, Model

__all__ = ["CudaRecorder", "Graphs", "Recorder"]

Replay = Callable[[], None]


class Recorder(Protocol):
    """Turns a function without arguments into one that does the same again."""

    def record(self, run: Replay) -> Replay:
        """Run, and return what repeats it on the same tensors."""
        ...


class CudaRecorder:
    """Captures CUDA graphs, all in one memory pool: one runs at a time, so they may share it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Replay) -> Replay:
        """Warm up, which compiles and allocates what is not the graph's, then capture."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay


class Graphs:
    """Stands before a model and replays what was captured; takes every call that it takes.

    What a forward yields holds until the next one: buckets share their results' memory.

    Args:
        model: Whose forwards are captured.
        pool: Its pages; the last one is spare.
        buckets: Sizes to capture; none: nothing is.
        pages_per_seq: Of the longest sequence.
        arena: Where inputs and results live; while it is released nothing is replayed.

    Attributes:
        num_replays: Forwards that were replayed.
        capture_s: Seconds that capturing took.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        buckets: Sequence[AnyBucket],
        pages_per_seq: int,
        arena: Arena | None = None,
    ) -> None:
        self._model, self._pool = model, pool
        self.buckets = tuple(sorted(buckets, key=lambda one: (-one.num_rows, -one.num_seqs)))
        self.slots, self._arena = SlotTable(arena), arena
        self._target: dict[AnyBucket, Replay] = {}
        self._draft: dict[AnyBucket, Replay] = {}
        self._prints = Fingerprints.of({})
        self.num_replays, self.capture_s = 0, 0.0
        if not buckets:
            return
        self._speculates = model.draft is not None
        width = TensorSpec((model.hidden_size,), model.dtype, model.device)
        self._inputs = BucketInputs(
            self.buckets,
            pages_per_seq=pages_per_seq,
            hidden=width if self._speculates else None,
            spare=SparePage(pool.num_pages - 1, pool.page_size),
            slots=self.slots,
            device=model.device,
        )
        rows = max(bucket.num_rows for bucket in buckets)
        logits = max(_num_logits(bucket) for bucket in buckets)
        sizes = {"logits": (logits, model.vocab_size)}
        if self._speculates:
            guesses = max(bucket.num_seqs for bucket in buckets)
            sizes["hidden of the target"] = (rows, model.hidden_size)
            sizes["logits of the draft"] = (guesses, model.vocab_size)
            sizes["hidden of the draft"] = (rows, model.hidden_size)
        self._results = {
            name: self.slots.allocate(name, TensorSpec(shape, model.dtype, model.device))
            for name, shape in sizes.items()
        }

    @torch.inference_mode()
    def capture(
        self, recorder: Recorder, progress: Progress, *, only: Sequence[AnyBucket] | None = None
    ) -> None:
        """Capture every bucket, the largest first: the smaller ones fit into its memory.

        Args:
            recorder: Captures one forward.
            progress: Told how far it has come.
            only: Not every bucket, but these.
        """
        buckets = self.buckets if only is None else only
        if not buckets:
            return
        began = time.perf_counter()
        self.slots.freeze()
        kinds = [(self._target, self._run_target)]
        if self._speculates:
            kinds.append((self._draft, self._run_draft))
        progress.start("capturing graphs", len(kinds) * len(buckets), "graphs")
        for captured, run in kinds:
            for bucket in buckets:
                self._inputs.fill_idle(bucket)
                captured[bucket] = recorder.record(_bound(run, bucket))
                progress.advance()
        progress.finish()
        self._prints = Fingerprints.of(self._read())
        self.capture_s = time.perf_counter() - began

    def check(self) -> None:
        """Compare every tensor that the graphs read with what it was at their capture.

        Raises:
            AddressChanged: It names those that moved.
        """
        if self._target:
            self._prints.check(self._read())

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
        *,
        wants_hidden: bool = False,
    ) -> Forward:
        """Compute one step, as `Model.forward` does."""
        rows = Rows(token_ids=token_ids, positions=positions, attn=attn, logits_at=logits_at)
        bucket = self._bucket_for(rows, self._target)
        if bucket is None or len(logits_at) > _num_logits(bucket):
            return self._model.forward(
                token_ids, positions, attn, pool, logits_at, wants_hidden=wants_hidden
            )
        row_of = self._replay(self._target, bucket, rows, num_logits=_num_logits(bucket))
        logits = self._results["logits"][: len(logits_at)]
        if not wants_hidden:
            return Forward(logits)
        return Forward(logits, self._hidden("hidden of the target", len(token_ids), row_of))

    def draft_forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attn: AttentionInputs,
        pool: KVPool,
        logits_at: Tensor,
    ) -> Forward:
        """Compute one pass of the draft, as `Model.draft_forward` does."""
        rows = Rows(
            token_ids=token_ids,
            positions=positions,
            attn=attn,
            logits_at=logits_at,
            hidden=hidden,
        )
        bucket = self._bucket_for(rows, self._draft)
        if bucket is None or len(logits_at) > bucket.num_seqs:
            return self._model.draft_forward(token_ids, hidden, positions, attn, pool, logits_at)
        row_of = self._replay(self._draft, bucket, rows, num_logits=bucket.num_seqs)
        logits = self._results["logits of the draft"][: len(logits_at)]
        return Forward(logits, self._hidden("hidden of the draft", len(token_ids), row_of))

    def _bucket_for(self, rows: Rows, captured: Mapping[AnyBucket, Replay]) -> AnyBucket | None:
        """Return the bucket to replay; `None` where the step must run as it is."""
        if not captured or (self._arena is not None and self._arena.is_released):
            return None
        q_lens, kv_lens = rows.attn.q_lens, rows.attn.kv_lens_host
        bucket = choose_bucket(tuple(captured), q_lens, kv_lens)
        if bucket is None or rows.attn.page_table.shape[1] > self._inputs.pages_per_seq:
            return None
        if isinstance(bucket, Bucket):
            q_lens = (bucket.q_len,) * bucket.num_seqs
            kv_lens = (*kv_lens, *(min(kv_lens),) * (bucket.num_seqs - len(kv_lens)))
        return bucket if self._model.attention.cuts(q_lens, kv_lens) else None

    def _replay(
        self,
        captured: Mapping[AnyBucket, Replay],
        bucket: AnyBucket,
        rows: Rows,
        *,
        num_logits: int,
    ) -> Tensor | None:
        row_of = self._inputs.fill(bucket, rows, num_logits=num_logits)
        captured[bucket]()
        self.num_replays += 1
        return row_of

    def _hidden(self, name: str, count: int, row_of: Tensor | None) -> Tensor:
        return self._results[name][:count] if row_of is None else self._results[name][row_of]

    def _run_target(self, bucket: AnyBucket) -> None:
        rows = self._inputs.rows(bucket, num_logits=_num_logits(bucket))
        found = self._model.forward(
            rows.token_ids,
            rows.positions,
            rows.attn,
            self._pool,
            rows.logits_at,
            wants_hidden=self._speculates,
        )
        self._keep("logits", found.logits)
        if found.hidden is not None:
            self._keep("hidden of the target", found.hidden)

    def _run_draft(self, bucket: AnyBucket) -> None:
        rows = self._inputs.rows(bucket, num_logits=bucket.num_seqs)
        assert rows.hidden is not None
        found = self._model.draft_forward(
            rows.token_ids, rows.hidden, rows.positions, rows.attn, self._pool, rows.logits_at
        )
        assert found.hidden is not None
        self._keep("logits of the draft", found.logits)
        self._keep("hidden of the draft", found.hidden)

    def _keep(self, name: str, result: Tensor) -> None:
        self._results[name][: len(result)].copy_(result)

    def _read(self) -> dict[str, Tensor]:
        """Return every tensor that a captured forward reads or writes, but for its own memory."""
        model = self._model
        tables = {"scratch": model.scratch, "pool": self._pool.slots, "graphs": self.slots}
        tables |= {path: layer.weights for path, layer in model.experts.items()}
        named = chain(model.hf.named_parameters(), model.hf.named_buffers())
        slots = (
            (f"{path}.{name}", tensor)
            for path, table in tables.items()
            for name, tensor in table.items()
        )
        return dict(chain(named, slots))


def _num_logits(bucket: AnyBucket) -> int:
    """Return the most rows whose logits a step of the target yields."""
    return bucket.num_seqs if isinstance(bucket, PromptBucket) else bucket.num_rows


def _bound(run: Callable[[AnyBucket], None], bucket: AnyBucket) -> Replay:
    return lambda: run(bucket)
