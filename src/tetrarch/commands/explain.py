# SPDX-License-Identifier: Apache-2.0
"""`tetrarch explain [MODEL] [settings]`: what would be served, and why, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tetrarch.config.args import GROUPS, LaunchArgs
from tetrarch.config.cli import Reading
from tetrarch.config.estimate import estimate_memory
from tetrarch.config.launch import plan_launch
from tetrarch.config.ledger import ASKED
from tetrarch.config.plan import Decision, Plan
from tetrarch.config.resolve_host import PROCESS_ENV
from tetrarch.core.knob import KnobField, knobs
from tetrarch.core.units import format_bytes
from tetrarch.engine.textless import tokenizer_of
from tetrarch.models.describe import describe
from tetrarch.models.fetch import fetch

__all__ = ["render", "run"]


def run(reading: Reading) -> int:
    """Print the plan of a launch, and return the exit status.

    Raises:
        LaunchErrors: Everything that is wrong with this launch.
    """
    plan = plan_launch(reading, describe=describe, fetch=fetch)
    if any(Path(plan.model.path).glob("*.safetensors")):  # else config.json alone is planned for
        tokenizer_of(plan)
    print(render(plan, reading.args))
    return 0


def render(plan: Plan, args: LaunchArgs) -> str:
    """Return the plan as text: one line a decision, under the headings of `--help`."""
    decisions = {decision.field: decision for decision in plan.decisions}
    lines: list[str] = []
    for group in GROUPS:
        fields = [field for field in knobs(LaunchArgs) if field.knob.group == group]
        lines += _section(group, [_decision(field, decisions, args) for field in fields])
    settings = {field.name for field in knobs(LaunchArgs)}
    derived = [decision for name, decision in decisions.items() if name not in settings]
    lines += _section("what follows", derived)
    lines += _section("memory, estimated", list(_memory(plan)))
    reasons = {name: why for name, _, why in PROCESS_ENV}
    spawned = [Decision(name, value, reasons[name]) for name, value in plan.process_env]
    lines += _section("environment of the engine process", spawned)
    return "\n".join(lines)


def _decision(field: KnobField, decisions: dict[str, Decision], args: LaunchArgs) -> Decision:
    if field.name in decisions:
        return decisions[field.name]
    value = vars(args)[field.name]
    return Decision(field.name, field.show(value), "default" if value == field.default else ASKED)


def _memory(plan: Plan) -> Iterator[Decision]:
    contract, dtype = plan.quant.contract, plan.model.dtype
    estimate = estimate_memory(
        plan.model.facts,
        contract,
        dtype=dtype,
        decoded_cache=plan.experts.decoded_cache,
        draft=plan.spec and (plan.quant.draft or contract),
    )
    kept = "codes and scales" if contract.quantizes_weights else dtype
    saved = f"{format_bytes(estimate.unquantized_experts)} in {dtype}"
    yield Decision("dense weights", format_bytes(estimate.dense), dtype)
    yield Decision("expert weights", format_bytes(estimate.experts), f"{kept}; {saved}")
    if estimate.decoded_experts:
        yield Decision("decoded experts", format_bytes(estimate.decoded_experts), dtype)
    yield Decision("kv cache, a token", format_bytes(estimate.kv_per_token), "all layers")
    if plan.memory.max_total_tokens is not None:
        tokens = plan.memory.max_total_tokens
        most = format_bytes(tokens * estimate.kv_per_token)
        yield Decision("kv cache, at most", most, f"{tokens} tokens; less where memory is short")


def _section(title: str, decisions: list[Decision]) -> list[str]:
    rows = [f"  {d.field:<30} {d.value:<24}  {d.why}".rstrip() for d in decisions]
    return [title, *rows, ""]
