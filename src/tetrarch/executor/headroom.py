# SPDX-License-Identifier: Apache-2.0
"""What a GPU's steps and graphs take beside weights and pages: tried out, before pages are sized.

The largest steps run once over a pool of just their size. What torch's allocator reserved at the
peak is what they need; nothing is guessed from shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tetrarch.config.plan import Plan
from tetrarch.core.progress import NoProgress
from tetrarch.core.units import ceil_div
from tetrarch.executor.capacity import Capacity
from tetrarch.executor.graphs import Graphs, Recorder
from tetrarch.executor.smoke import smoke_steps

__all__ = ["free_after_cleanup", "graph_bytes", "step_bytes", "trial_capacity"]

_ENDLESS = 1 << 40  # pages


def trial_capacity(plan: Plan) -> Capacity:
    """Return the pool that the smoke steps need; like every pool, for no more than may run."""
    size = plan.memory.page_size
    most = plan.schedule.max_running_requests * ceil_div(plan.model.context_len, size)
    steps = smoke_steps(plan, Capacity(_ENDLESS, size))
    pages = (page for step in steps for seq in step.seqs for page in seq.pages)
    return Capacity(min(max(pages, default=0) + 1, most), size)


def step_bytes(run: Callable[[], None]) -> int:
    """Return the most device memory that is reserved while `run` runs, beyond what is now."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def graph_bytes(graphs: Graphs, recorder: Recorder) -> int:
    """Return what all graphs will take, from capturing the largest and the smallest.

    The largest brings the memory that all share, the smallest what each has of its own.
    """
    if not graphs.buckets:
        return 0
    free = [free_after_cleanup()]
    for bucket in (graphs.buckets[0], graphs.buckets[-1]):
        graphs.capture(recorder, NoProgress(), only=(bucket,))
        free.append(free_after_cleanup())
    others = len(graphs.buckets) - 1
    return graphs.slots.num_bytes + free[0] - free[1] + others * max(0, free[1] - free[2])


def free_after_cleanup() -> int:
    """Return the device's free memory, with nothing kept for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
