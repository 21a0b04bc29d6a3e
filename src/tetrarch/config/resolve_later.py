# SPDX-License-Identifier: Apache-2.0
"""Settle ranks, graphs, attention and determinism.

Several ranks are declared, sized for, and refused until they exist. What is refused is carried on
as it was asked for, so that whatever else it breaks is reported too.
"""

from __future__ import annotations

from tetrarch.config.args import LaunchArgs
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.plan import GraphPlan, ParallelPlan, SchedulePlan
from tetrarch.config.support import Route
from tetrarch.core.errors import ConfigError, Unsupported

__all__ = ["resolve_attention", "resolve_deterministic", "resolve_graphs", "resolve_parallel"]


# A 48-layer model takes 65 ms to launch without graphs, 25 compiled, and 33 to compute so many.
_PREFILL = 2048  # tokens


def _not_yet(what: str, why: str) -> Unsupported:
    return Unsupported(f"{what} is not supported yet", why=why, fix="leave it out")


def resolve_parallel(args: LaunchArgs, ledger: Ledger) -> ParallelPlan:
    """Settle the ranks."""
    asked = {"--tp-size": args.tp_size, "--dp-size": args.dp_size, "--ep-size": args.ep_size or 1}
    for flag, size in asked.items():
        if size > 1:
            ledger.refuse(_not_yet(f"{flag} {size}", "one process serves one device so far"))
    if args.max_dispatch_tokens is not None:
        ledger.refuse(
            _not_yet(
                f"--max-dispatch-tokens {args.max_dispatch_tokens}",
                "it bounds the all-to-all dispatcher, which is not part of tetrarch yet",
            )
        )
    ledger.decide("ep_size", 1, "one rank holds all experts")
    ledger.decide("max_dispatch_tokens", "not used", "all_gather sends whole steps")
    return ParallelPlan(
        tp=args.tp_size,
        dp=args.dp_size,
        ep=args.ep_size or 1,
        max_dispatch_tokens=args.max_dispatch_tokens,
    )


def resolve_graphs(
    args: LaunchArgs,
    device: Device,
    schedule: SchedulePlan,
    ledger: Ledger,
    *,
    route: Route | None,
    attention: str,
) -> GraphPlan:
    """Settle what is captured: decode and verify steps, and prefill steps that are short."""
    waits = _what_waits(device, route, attention)
    asked = {
        "--cuda-graphs on": args.cuda_graphs == "on",
        f"--graph-max-batch {args.graph_max_batch}": args.graph_max_batch,
        f"--graph-max-prefill-tokens {args.graph_max_prefill_tokens}": (
            args.graph_max_prefill_tokens
        ),
    }
    for flag, is_asked in asked.items():
        if waits and is_asked:
            ledger.refuse(Unsupported(f"{flag} is not supported", why=waits, fix="leave it out"))
    off = ASKED if args.cuda_graphs == "off" else waits
    if off:
        if args.cuda_graphs == "auto":
            ledger.decide("cuda_graphs", "off", off)
        for field in ("graph_max_batch", "graph_max_prefill_tokens"):
            ledger.decide(field, 0, "nothing is captured")
        if not waits:
            return GraphPlan(0, 0)
        return GraphPlan(args.graph_max_batch or 0, args.graph_max_prefill_tokens or 0)
    most, why = schedule.max_running_requests, "as many as may run"
    if args.graph_max_batch is not None:
        why = ASKED if args.graph_max_batch <= most else f"{why}; asked for were more"
        most = min(most, args.graph_max_batch)
    ledger.decide("graph_max_batch", most, why)
    longest = min(_PREFILL, schedule.chunk_tokens or schedule.max_prefill_tokens)
    why = "above, a GPU takes longer to compute than the host to launch"
    prefill = ledger.pick("graph_max_prefill_tokens", args.graph_max_prefill_tokens, longest, why)
    plan = GraphPlan(most, prefill)
    if args.cuda_graphs == "auto":
        sizes = f"{len(plan.decode_batches)} sizes of batch, {len(plan.prefill_sizes)} of prompts"
        ledger.decide("cuda_graphs", "on", f"decode, verify and short prefill steps, in {sizes}")
    return plan


def _what_waits(device: Device, route: Route | None, attention: str) -> str:
    """Return why no step can be captured; empty where one can."""
    if device.arch is Arch.CPU:
        return "a CPU has no graphs to capture"
    if route is not None and route.runner != "triton":
        return f"the {route.runner} runner waits for the device"
    return "" if attention == "triton" else "torch's attention is laid out by the host"


def resolve_attention(args: LaunchArgs, device: Device, ledger: Ledger) -> str:
    """Settle who computes attention."""
    on_cpu = device.arch is Arch.CPU
    if args.attention_backend == "triton" and on_cpu:
        ledger.refuse(
            Unsupported(
                "--attention-backend triton is not supported on the CPU",
                why="Triton compiles its kernels for NVIDIA GPUs alone",
                fix="leave it out",
            )
        )
    asked = None if args.attention_backend == "auto" else args.attention_backend
    why = "it runs everywhere" if on_cpu else "it reads pages where they are, for any batch"
    return ledger.pick("attention_backend", asked, "torch" if on_cpu else "triton", why)


def resolve_deterministic(args: LaunchArgs, device: Device, ledger: Ledger) -> bool:
    """Settle whether results may depend on what runs beside them."""
    on_gpu = args.deterministic and device.arch is not Arch.CPU
    for flag, asked, only in (
        ("--attention-backend", args.attention_backend, "triton"),
        ("--moe-runner", args.moe_runner, "triton"),
    ):
        if on_gpu and asked not in ("auto", only):
            ledger.refuse(
                Unsupported(
                    f"--deterministic with {flag} {asked} is not supported on {device.arch}",
                    why="nobody has shown that it gives a row the same bits whatever other rows "
                    "there are",
                    fix=f"{flag} {only}, or leave --deterministic out",
                )
            )
    if args.deterministic and args.fused_finalize:
        ledger.refuse(
            ConfigError(
                "--deterministic and --fused-finalize contradict each other",
                why="the fused finalize adds in whatever order the experts finish",
                fix="leave one of the two out",
            )
        )
    where = "one kind of GPU" if on_gpu else "one kind of CPU and threads"
    why = f"a request's bits depend on its prompt, settings and seed; on {where}"
    no = "a request's last bits depend on what runs beside it"
    ledger.decide("deterministic", *(("on", why) if args.deterministic else ("off", no)))
    return args.deterministic
