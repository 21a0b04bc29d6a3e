# SPDX-License-Identifier: Apache-2.0
"""Settle how the experts are computed. The support table is asked here, once."""

from __future__ import annotations

from tetrarch.config.args import LaunchArgs
from tetrarch.config.estimate import estimate_memory
from tetrarch.config.hardware import Device
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.plan import ExpertPlan, ModelPlan, QuantPlan, TokenBudget
from tetrarch.config.support import Finalize, Query, Route, Wire, choose
from tetrarch.core.errors import ConfigError
from tetrarch.core.units import format_bytes

__all__ = ["resolve_decoded_cache", "resolve_experts", "resolve_route"]

_CACHE_SHARE = 4  # the cache may take one part in four of the memory


def resolve_route(args: LaunchArgs, quant: QuantPlan, device: Device, ledger: Ledger) -> Route:
    """Ask the table.

    Raises:
        Unsupported: No row fits.
        LaunchErrors: Several things that were asked for are refused.
    """
    asked_runner = None if args.moe_runner == "auto" else args.moe_runner
    asked_dispatch = None if args.moe_dispatch == "auto" else args.moe_dispatch
    route = choose(
        Query(
            activations=quant.contract.activations,
            quantization=quant.contract.quantization,
            arch=device.arch,
            runner=asked_runner,
            dispatch=asked_dispatch,
            wire=None if args.moe_wire == "auto" else Wire(args.moe_wire),
            finalize=Finalize.FUSED if args.fused_finalize else None,
        )
    )
    first = f"the first row for {quant.contract.name} on {device.arch}"
    untried = "; compiled for this device, but never run on one"
    why = ASKED if asked_runner else first
    note = untried if device.arch in route.only_compiled else ""
    ledger.decide("moe_runner", route.runner, why + note)
    one_rank = f"{first}; with one rank it sends nothing"
    ledger.decide("moe_dispatch", route.dispatch, ASKED if asked_dispatch else one_rank)
    ledger.decide("moe_wire", route.wire, f"what {route.runner} takes under {route.activations}")
    return route


def resolve_experts(
    args: LaunchArgs, route: Route, budget: TokenBudget, ledger: Ledger, *, decoded_cache: bool
) -> ExpertPlan:
    """Settle the buffers, and who adds up the experts' shares of a token."""
    ledger.decide("tokens_per_step", budget.per_rank, f"at most: {budget.term}")
    finalize = Finalize.FUSED if args.fused_finalize else route.finalize[0]
    return ExpertPlan(route=route, finalize=finalize, budget=budget, decoded_cache=decoded_cache)


def resolve_decoded_cache(
    args: LaunchArgs,
    route: Route,
    ledger: Ledger,
    *,
    model: ModelPlan,
    quant: QuantPlan,
    device: Device,
) -> bool:
    """Settle whether decoded experts are kept beside the packed ones."""
    useful = route.runner == "reference" and quant.contract.quantizes_weights
    if args.decoded_cache == "on" and not useful:
        ledger.refuse(
            ConfigError(
                "--decoded-cache on has no effect",
                why=f"{quant.contract.name} through {route.runner} has no packed experts to decode",
                fix="leave it out",
            )
        )
    if args.decoded_cache != "auto" or not useful:
        why = ASKED if args.decoded_cache != "auto" else "there is nothing to decode"
        ledger.decide("decoded_cache", args.decoded_cache if useful else "off", why)
        return useful and args.decoded_cache == "on"
    estimate = estimate_memory(
        model.facts, quant.contract, dtype=model.dtype, decoded_cache=True, draft=quant.draft
    )
    need, have = estimate.decoded_experts, device.memory_bytes
    fits = need * _CACHE_SHARE <= have
    verdict = "fit in" if fits else "are more than"
    ledger.decide(
        "decoded_cache",
        "on" if fits else "off",
        f"{format_bytes(need)} of decoded experts {verdict} a quarter of {format_bytes(have)}",
    )
    return fits
