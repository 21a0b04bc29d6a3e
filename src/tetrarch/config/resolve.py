# SPDX-License-Identifier: Apache-2.0
"""Turn what was asked, what the checkpoint is and what the device can do into a plan.

Pure: no environment, no device, no globals. Each step takes the results it needs, so that the
order is held by types. Every error of a launch is raised together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tetrarch.config.args import LaunchArgs
from tetrarch.config.budget import token_budget
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.drafts import DraftCheckpoint
from tetrarch.config.hardware import Device
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.resolve_compile import resolve_compile
from tetrarch.config.resolve_experts import resolve_decoded_cache, resolve_experts, resolve_route
from tetrarch.config.resolve_host import resolve_process_env, resolve_threads
from tetrarch.config.resolve_later import (
    resolve_attention,
    resolve_deterministic,
    resolve_graphs,
    resolve_parallel,
)
from tetrarch.config.resolve_model import resolve_model, resolve_serve
from tetrarch.config.resolve_quant import resolve_quant
from tetrarch.config.resolve_schedule import resolve_memory, resolve_schedule
from tetrarch.config.resolve_spec import resolve_draft_quant, resolve_speculation
from tetrarch.core.errors import LaunchErrors, TetrarchError

__all__ = ["resolve"]


def resolve(
    args: LaunchArgs,
    checkpoint: Checkpoint,
    facts: ModelFacts,
    device: Device,
    *,
    draft: DraftCheckpoint | None = None,
    earlier: Sequence[TetrarchError] = (),
) -> Plan:
    """Decide everything.

    Args:
        args: What was asked for.
        checkpoint: What the checkpoint is.
        facts: What the model is.
        device: What it runs on.
        draft: What another checkpoint of the draft is, where one was named.
        earlier: What was wrong with the settings themselves; raised with ours.

    Raises:
        LaunchErrors: Everything that is wrong with this launch.
    """
    ledger = Ledger(earlier)
    first = f", the first of {device.num_devices}" if device.num_devices > 1 else ""
    ledger.decide("device", device.torch_device, f"{device.arch}, {device.name}{first}")
    plan = ledger.attempt(lambda: _decide(args, checkpoint, facts, device, ledger, draft=draft))
    if plan is None or ledger.errors:
        raise LaunchErrors(ledger.errors)
    return plan


def _decide(
    args: LaunchArgs,
    checkpoint: Checkpoint,
    facts: ModelFacts,
    device: Device,
    ledger: Ledger,
    *,
    draft: DraftCheckpoint | None,
) -> Plan | None:
    model = resolve_model(args, checkpoint, facts, ledger)
    serve = resolve_serve(args, model, ledger)
    parallel = resolve_parallel(args, ledger)
    spec = resolve_speculation(args, checkpoint, facts, ledger, draft=draft)
    attention = resolve_attention(args, device, ledger)
    deterministic = resolve_deterministic(args, device, ledger)
    compiles = resolve_compile(args, facts, device, ledger, deterministic=deterministic)
    schedule = resolve_schedule(args, spec, device, ledger)
    memory = resolve_memory(args, model, device, schedule, ledger)
    threads = resolve_threads(args, parallel, device, ledger)
    quant = resolve_quant(args, checkpoint, facts, ledger)
    quant = resolve_draft_quant(args, spec, (draft or checkpoint).draft, quant, ledger)
    route = ledger.attempt(lambda: resolve_route(args, quant, device, ledger))
    graphs = resolve_graphs(args, device, schedule, ledger, route=route, attention=attention)
    dispatch = args.moe_dispatch if route is None else route.dispatch
    sized = partial(token_budget, schedule, spec, graphs=graphs, parallel=parallel)
    budget = ledger.attempt(lambda: sized(dispatch=dispatch, context_len=model.context_len))
    if route is None or budget is None:
        return None
    cache = resolve_decoded_cache(args, route, ledger, model=model, quant=quant, device=device)
    experts = resolve_experts(args, route, budget, ledger, decoded_cache=cache)
    return Plan(
        model=model,
        quant=quant,
        parallel=parallel,
        experts=experts,
        spec=spec,
        graphs=graphs,
        memory=memory,
        schedule=schedule,
        serve=serve,
        device=device,
        attention=attention,
        deterministic=deterministic,
        compiles_layers=compiles,
        num_threads=threads,
        process_env=resolve_process_env(threads),
        decisions=tuple(ledger.decisions),
    )
