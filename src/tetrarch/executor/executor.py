# SPDX-License-Identifier: Apache-2.0
"""One rank: a model, its KV pool, and the step that runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from tetrarch.attention.pool import KVPool, bytes_per_token
from tetrarch.config.plan import Plan
from tetrarch.core.errors import CheckpointError
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.executor.batch import build_batch
from tetrarch.executor.buckets import buckets_of, pages_per_seq
from tetrarch.executor.capacity import Capacity, free_bytes, free_host_bytes, kv_capacity
from tetrarch.executor.graphs import CudaRecorder, Graphs, Recorder
from tetrarch.executor.headroom import (
    free_after_cleanup,
    graph_bytes,
    step_bytes,
    trial_capacity,
)
from tetrarch.executor.regions import RegionChange, Regions, RegionState
from tetrarch.executor.results import Draws
from tetrarch.executor.rows import RowMemory
from tetrarch.executor.smoke import smoke_steps
from tetrarch.executor.speculate import with_drafts
from tetrarch.executor.step import Done, Pending, Step, StepResult
from tetrarch.executor.updates import WeightsState
from tetrarch.executor.weights import WeightStore
from tetrarch.memory.slots import Region
from tetrarch.models.build import Model, build_model
from tetrarch.models.compiled import compile_layers
from tetrarch.models.load import LoadReport
from tetrarch.models.routers import swap_routers
from tetrarch.models.surgery import part_unlike

__all__ = ["KV_RELEASED", "READY", "Executor"]

READY = WeightsState.READY.value
KV_RELEASED = "kv_released"


class Executor:
    """Everything one rank keeps on its device.

    When the constructor returns, weights are loaded, the pool is allocated and the smallest and
    largest forwards have run. Not thread-safe: one thread steps.

    Args:
        plan: What to build.
        progress: Told how far loading and capturing have come.
        recorder: Captures; CUDA's by default.

    Attributes:
        device: Where it computes.
        regions: What memory is there; nothing may step while some is released.
        capacity: Pages and tokens of the KV pool.
        load_report: What the first load found.
        weights: Checks, replaces and restores the weights, between steps.
        num_steps: Forwards run for somebody; the smoke forwards do not count.
        moe_tokens_high_water: Most rows that one forward brought to the expert layers.

    Raises:
        CheckpointError: The weights do not fit the model, or yield logits that are not finite.
        ConfigError: The KV pool does not hold one context.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        progress: Progress | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.plan = plan
        self.device = torch.device(plan.device.torch_device)
        if plan.device.torch_device == "cpu":
            torch.set_num_threads(plan.num_threads)
        self.regions = Regions(plan.memory, self.device)
        self._model: Model = build_model(
            plan, device=self.device, arena=self.regions[Region.WEIGHTS]
        )
        host = partial(free_host_bytes, plan.device)
        self.weights = WeightStore(self._model, plan, free_host=host)
        self.load_report: LoadReport = self.weights.load(progress or NoProgress())
        part_unlike(self._model.hf)
        if plan.compiles_layers:
            swap_routers(self._model.hf)
            compile_layers(self._model)
        self._rows = RowMemory(plan.schedule.max_running_requests, self.device)
        self._keeps_weights = False  # since the last release
        self.num_steps = self.moe_tokens_high_water = 0
        recorder = recorder or (CudaRecorder(self.device) if self.device.type == "cuda" else None)
        self._lay_out(self._measured_capacity())
        self._graph_bytes = self._capture(recorder, progress or NoProgress())
        self._smoke()
        self.num_steps = self.moe_tokens_high_water = 0

    def _measured_capacity(self) -> Capacity:
        """Size the pages by what is free, less what steps and graphs will take."""
        taken = 0
        if self.device.type == "cuda":
            self._lay_out(trial_capacity(self.plan), is_trial=True)
            taken = step_bytes(self._smoke)
            # A recorder of its own: its memory pool ends with the last graph captured into it.
            taken += graph_bytes(self._graphs, CudaRecorder(self.device))
            del self._pool, self._graphs
            free_after_cleanup()
        return kv_capacity(
            self.plan,
            bytes_per_token=bytes_per_token(self._model.sites, self._model.dtype),
            free=max(0, free_bytes(self.plan.device) - taken),
        )

    def _lay_out(self, capacity: Capacity, *, is_trial: bool = False) -> None:
        """Allocate the pages, and what graphs read and write."""
        buckets = buckets_of(self.plan)
        self.capacity: Capacity = capacity
        self._pool = KVPool(
            self._model.sites,
            capacity.num_pages + bool(buckets),  # a spare one, for what fills buckets
            page_size=capacity.page_size,
            dtype=self._model.dtype,
            device=self.device,
            arena=None if is_trial else self.regions[Region.KV_CACHE],
        )
        self._graphs = Graphs(
            self._model,
            self._pool,
            buckets=buckets,
            pages_per_seq=pages_per_seq(self.plan),
            arena=None if is_trial else self.regions[Region.GRAPHS],
        )

    def _capture(self, recorder: Recorder | None, progress: Progress) -> int:
        """Capture what the plan says; return the bytes that it took."""
        if recorder is None or not self._graphs.buckets:
            return 0
        is_cuda = self.device.type == "cuda"
        before = free_after_cleanup() if is_cuda else 0
        self._graphs.capture(recorder, progress)
        self.weights.verify = self._graphs.check
        after = free_after_cleanup() if is_cuda else 0
        return self._graphs.slots.num_bytes + max(0, before - after)

    def step(self, step: Step) -> StepResult:
        """Launch a step and wait for it.

        Raises:
            CapacityExceeded: The step is larger than the buffers; nothing was computed.
        """
        return self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Start one forward and draw the next tokens; a CPU has computed them on return.

        The draft, where there is one, guesses those after them while `wait` waits. So with
        drafts, and whatever reads more than `FUTURE` of this step's tokens, a step is to be
        launched only when the one before has been waited for.

        Raises:
            CapacityExceeded: The step is larger than the buffers; nothing was computed.
        """
        if not step.seqs:
            return Done(StepResult())
        batch = build_batch(
            step,
            page_size=self.capacity.page_size,
            budget=self.plan.experts.budget,
            memory=self._rows,
        )
        self.num_steps += 1
        self.moe_tokens_high_water = max(self.moe_tokens_high_water, sum(batch.rank_tokens))
        found = self._graphs.forward(
            batch.token_ids,
            batch.positions,
            batch.attn,
            self._pool,
            batch.logits_at,
            wants_hidden=any(seq.draft is not None for seq in step.seqs),
        )
        draws = Draws(step, found.logits)
        self._rows.note_drawn(batch.drawn, draws.token_ids)
        if found.hidden is None:
            return draws
        return _Drafts(
            draws,
            partial(
                with_drafts, self._graphs, self._pool, step=step, batch=batch, hidden=found.hidden
            ),
        )

    @property
    def state(self) -> str:
        """`READY`, or the code of the 503 that says why no step may run.

        Graphs are none of the reasons: without them a step runs all the same.
        """
        if self.weights.state is not WeightsState.READY:
            return self.weights.state.value
        released = self.regions.states[Region.KV_CACHE] is RegionState.RELEASED
        return KV_RELEASED if released else READY

    @property
    def region_states(self) -> Mapping[Region, RegionState]:
        """What memory is there."""
        return self.regions.states

    def release(self, tags: Collection[Region], *, backup: bool | None = None) -> RegionChange:
        """Give memory back; keys and values are lost.

        Args:
            tags: Which regions. Those that are released already stay so.
            backup: Keep the weights, so that `resume` brings them back; `None`: as the plan says.

        Raises:
            ConfigError: This memory cannot be released or kept; nothing was released.
            MemoryRefused: There is no room to keep the weights; nothing was released.
        """
        backup = self.plan.memory.weights_backup if backup is None else backup
        if Region.WEIGHTS in tags:
            self.weights.abandon()
        change = self.regions.release(tags, backup=backup)
        if Region.WEIGHTS in tags and Region.WEIGHTS not in change.already:
            self._keeps_weights = backup
            self.weights.note_released()
        return change

    def resume(self, tags: Collection[Region]) -> RegionChange:
        """Take memory again, at the same addresses; regions that are there stay as they are.

        Raises:
            MemoryRefused: The weights that were kept cannot be read; they stay released.
        """
        change = self.regions.resume(tags)
        if Region.WEIGHTS in tags and Region.WEIGHTS not in change.already:
            self.weights.note_resumed(restored=self._keeps_weights)
        return change

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes by region, and of the scratch that layers share; graphs where there are any."""
        graphs = {Region.GRAPHS: self._graph_bytes} if self._graphs.buckets else {}
        return {
            Region.WEIGHTS: self.weights.num_bytes,
            Region.KV_CACHE: self._pool.slots.num_bytes,
            **graphs,
            "scratch": self._model.scratch.num_bytes,
        }

    def _smoke(self) -> None:
        for step in smoke_steps(self.plan, self.capacity):
            if any(result.failed for result in self.step(step).seqs):
                raise CheckpointError(
                    f"the model yields logits that are not finite, for {step.num_tokens} tokens",
                    why="the weights hold NaN or Inf, or overflow " + self.plan.model.dtype,
                    fix="check the checkpoint; float16 models may need --dtype bfloat16",
                )


@dataclass(frozen=True, slots=True)
class _Drafts:
    """A step after which the draft guesses, once it is known which tokens were accepted."""

    draws: Draws
    add_drafts: Callable[..., StepResult]

    @torch.inference_mode()
    def wait(self) -> StepResult:
        return self.add_drafts(result=self.draws.wait())
