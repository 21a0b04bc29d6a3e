# SPDX-License-Identifier: Apache-2.0
"""Settle who may run, how prompts are cut, and how much the KV cache may hold."""

from __future__ import annotations

from dataclasses import dataclass

from tetrarch.config.args import LaunchArgs
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.plan import MemoryPlan, ModelPlan, SchedulePlan, SpecPlan
from tetrarch.core.errors import ConfigError

__all__ = ["resolve_memory", "resolve_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What a kind of device is given where the operator says nothing."""

    chunk: int
    running: int
    fraction: float
    why_step: str
    why_memory: str


_PAGE = 16  # tokens: small enough to share prefixes, large enough to keep page tables short
_SPECULATING = 48  # requests; each brings several tokens to every step
_CPU = _Defaults(
    chunk=512,
    running=64,
    fraction=0.3,
    why_step="for a CPU, so that a step stays short",
    why_memory="for a CPU, whose memory other programs share",
)
_GPU = _Defaults(
    chunk=8192,
    running=256,
    fraction=0.9,
    why_step="for a GPU, so that a step fills it",
    why_memory="for a GPU, which nothing else uses",
)


def _defaults(device: Device) -> _Defaults:
    return _CPU if device.arch is Arch.CPU else _GPU


def resolve_memory(
    args: LaunchArgs, model: ModelPlan, device: Device, schedule: SchedulePlan, ledger: Ledger
) -> MemoryPlan:
    """Settle the bounds of the KV pool; the executor measures what is free within them."""
    defaults = _defaults(device)
    page = _page_size(args)
    ledger.decide("page_size", page, "by default" if args.page_size is None else ASKED)
    cap = args.max_total_tokens
    if cap is not None:
        ledger.decide("max_total_tokens", cap, ASKED)
    elif device.arch is Arch.CPU:
        cap = schedule.max_running_requests * model.context_len
        ledger.decide("max_total_tokens", cap, "as much as all running requests could hold")
    else:
        ledger.decide("max_total_tokens", "by memory", "measured after loading")
    if args.kv_cache_bytes is None:
        ledger.decide("kv_cache_bytes", "by fraction", "measured after loading")
    elif args.kv_cache_fraction is not None:
        ledger.refuse(
            ConfigError(
                "--kv-cache-bytes and --kv-cache-fraction both size the KV cache",
                why="one of them would have no effect",
                fix="leave one out",
            )
        )
    fraction = ledger.pick(
        "kv_cache_fraction", args.kv_cache_fraction, defaults.fraction, defaults.why_memory
    )
    _check_backup(args, device, ledger)
    return MemoryPlan(
        page_size=page,
        max_total_tokens=cap,
        kv_bytes=args.kv_cache_bytes,
        fraction=fraction,
        saver=args.enable_memory_saver,
        weights_backup=args.enable_weights_cpu_backup,
    )


def resolve_schedule(
    args: LaunchArgs, spec: SpecPlan | None, device: Device, ledger: Ledger
) -> SchedulePlan:
    """Settle the limits of one step. Speculation comes first: it bounds who may run."""
    defaults = _defaults(device)
    running, why = defaults.running, defaults.why_step
    if spec and running > _SPECULATING:
        running, why = _SPECULATING, "every request brings its draft tokens to every step"
    running = ledger.pick("max_running_requests", args.max_running_requests, running, why)
    chunk = _chunk(args, defaults, ledger)
    mixed = args.mixed_chunk and chunk > 0
    if args.mixed_chunk and not mixed:
        ledger.decide("mixed_chunk", "off", "prompts are not cut into chunks")
    return SchedulePlan(
        max_running_requests=running,
        max_prefill_tokens=args.max_prefill_tokens,
        chunk_tokens=chunk,
        mixed_chunk=mixed,
        prefix_cache=args.prefix_cache,
        overlap=_overlap(args, spec, device, ledger),
    )


def _overlap(args: LaunchArgs, spec: SpecPlan | None, device: Device, ledger: Ledger) -> bool:
    """Settle whether a step is launched before the results of the last one are read."""
    asked = args.overlap_schedule
    if spec is not None and asked == "on":
        ledger.refuse(
            ConfigError(
                "--overlap-schedule on contradicts speculation",
                why="how many drafts a step accepts decides where the next one begins",
                fix="leave one of the two out",
            )
        )
    if asked != "auto":
        is_on, why = asked == "on", ASKED
    elif spec is not None:
        is_on, why = False, "what a step accepts decides where the next one begins"
    elif device.arch is Arch.CPU:
        is_on, why = False, "a CPU would compute the next step before it tells of the last one"
    else:
        is_on, why = True, "a GPU need not wait for the host between two steps"
    ledger.decide("overlap_schedule", "on" if is_on else "off", why)
    return is_on


def _check_backup(args: LaunchArgs, device: Device, ledger: Ledger) -> None:
    releasable = args.enable_memory_saver or device.arch is Arch.CPU
    if args.enable_weights_cpu_backup and not releasable:
        ledger.refuse(
            ConfigError(
                "--enable-weights-cpu-backup without --enable-memory-saver",
                why="a GPU's weights cannot be released, so there is nothing to keep",
                fix="add --enable-memory-saver, or leave it out",
            )
        )


def _page_size(args: LaunchArgs) -> int:
    return _PAGE if args.page_size is None else args.page_size


def _chunk(args: LaunchArgs, defaults: _Defaults, ledger: Ledger) -> int:
    page, limit, asked = _page_size(args), args.max_prefill_tokens, args.chunked_prefill_size
    if asked is not None and asked <= 0:
        ledger.decide("chunked_prefill_size", "off", ASKED)
        return 0
    if limit < page:
        ledger.refuse(
            ConfigError(
                f"--max-prefill-tokens {limit} is less than a page of {page} tokens",
                why="a chunk is a whole number of pages",
                fix=f"--max-prefill-tokens {page} or more, or a smaller --page-size",
            )
        )
    chunk, why = (defaults.chunk, defaults.why_step) if asked is None else (asked, ASKED)
    if chunk > limit:
        chunk, why = limit, f"{why}; capped by --max-prefill-tokens"
    if chunk % page:
        rounded = max(page, chunk // page * page)
        chunk, why = rounded, f"{why}; {chunk} is not a whole number of pages of {page}"
    ledger.decide("chunked_prefill_size", chunk, why)
    return chunk
