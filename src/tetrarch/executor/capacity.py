# SPDX-License-Identifier: Apache-2.0
"""How many KV pages fit, measured once the weights are where they stay."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from tetrarch.config.hardware import Device
from tetrarch.config.plan import MemoryPlan, Plan
from tetrarch.core.errors import ConfigError
from tetrarch.core.units import ceil_div, format_bytes

__all__ = ["Capacity", "free_bytes", "free_host_bytes", "kv_capacity"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of the KV pool."""

    num_pages: int
    page_size: int  # tokens

    @property
    def max_total_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.num_pages * self.page_size


def kv_capacity(plan: Plan, *, bytes_per_token: int, free: int) -> Capacity:
    """Size the pool: as the operator says in tokens or bytes, else by a fraction of what is free.

    The pool never exceeds what the running requests could fill with a full context each, and
    always holds one full context.

    Args:
        plan: `memory`, `schedule` and the context length are read.
        bytes_per_token: Of all attention layers together.
        free: Bytes available on the device.

    Raises:
        ConfigError: One full context does not fit, or the size asked for is not free.
    """
    memory, context_len = plan.memory, plan.model.context_len
    tokens, said = _tokens(memory, bytes_per_token=bytes_per_token, free=free)
    pages_of_context = ceil_div(context_len, memory.page_size)
    if (fitting := tokens // memory.page_size) < pages_of_context:
        shorter = f"--context-length {fitting * memory.page_size} or less, or " if fitting else ""
        raise ConfigError(
            f"the KV cache does not hold one context of {context_len} tokens",
            why=f"{said}: {fitting} pages of {memory.page_size} tokens",
            fix=f"{shorter}a larger --kv-cache-bytes, --kv-cache-fraction or --max-total-tokens",
        )
    num_pages = min(fitting, plan.schedule.max_running_requests * pages_of_context)
    if (size := num_pages * memory.page_size * bytes_per_token) > free:
        raise ConfigError(
            f"a KV cache of {format_bytes(size)} does not fit",
            why=f"{said}, and {format_bytes(free)} are free after loading the weights",
            fix="ask for less, or leave it out and take a --kv-cache-fraction",
        )
    return Capacity(num_pages, memory.page_size)


def _tokens(memory: MemoryPlan, *, bytes_per_token: int, free: int) -> tuple[int, str]:
    """Return how many tokens were asked for, and by what."""
    asked: list[tuple[int, str]] = []
    if memory.max_total_tokens is not None:
        asked.append((memory.max_total_tokens, f"--max-total-tokens {memory.max_total_tokens}"))
    if memory.kv_bytes is not None:
        asked.append((memory.kv_bytes // bytes_per_token, f"--kv-cache-bytes {memory.kv_bytes}"))
    if not asked:
        why = f"{memory.fraction:.0%} of the {format_bytes(free)} that are free after loading"
        asked.append((int(free * memory.fraction) // bytes_per_token, why))
    return min(asked)


def free_bytes(device: Device) -> int:
    """Return how many bytes this process may still allocate on the device."""
    if device.torch_device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return free_host_bytes(device)


def free_host_bytes(device: Device) -> int:
    """Return how many bytes of host memory this process may still allocate.

    A container may allow less than the host has free; a CPU's `memory_bytes` knows its limit.
    """
    if device.torch_device == "cuda":  # `memory_bytes` is the card's
        return psutil.virtual_memory().available
    used = psutil.Process().memory_info().rss
    return max(0, min(psutil.virtual_memory().available, device.memory_bytes - used))
