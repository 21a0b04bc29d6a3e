# SPDX-License-Identifier: Apache-2.0
"""Settle the contract: which numbers stand for the experts' weights and inputs."""

from __future__ import annotations

from collections.abc import Sequence

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.estimate import dtype_bytes
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.patterns import is_pattern
from tetrarch.config.plan import ModelFacts, QuantPlan
from tetrarch.core.errors import ConfigError, Unsupported
from tetrarch.core.units import format_bytes
from tetrarch.numerics.contract import (
    CONTRACTS,
    WEIGHT_RECIPE,
    Activations,
    QuantContract,
    Quantization,
    Recipe,
    activations_of,
    contract_for,
)

__all__ = ["resolve_quant"]

_GROUP = 16


def resolve_quant(
    args: LaunchArgs, checkpoint: Checkpoint, facts: ModelFacts, ledger: Ledger
) -> QuantPlan:
    """Settle contract, recipes and exemptions.

    Where no contract fits what was asked and what the checkpoint is, that is refused, and what is
    returned serves to find what else is wrong with the launch.
    """
    ledger.decide("source", checkpoint.source, f"the checkpoint is {checkpoint.label}")
    contract = _contract(args, checkpoint, facts, ledger)
    _check_sizes(contract, facts, ledger)
    recipe = _activation_recipe(args, contract, ledger)
    return QuantPlan(
        contract=contract,
        source=checkpoint.source,
        ignored_layers=_ignored(args, checkpoint, contract, ledger),
        weight_recipe=WEIGHT_RECIPE,
        activation_recipe=recipe,
        fc2_input_scale=_fc2_input_scale(args, contract, recipe, ledger),
    )


def _contract(
    args: LaunchArgs, checkpoint: Checkpoint, facts: ModelFacts, ledger: Ledger
) -> QuantContract:
    quantization = _quantization(args, checkpoint, ledger)
    activations = _activations(args, checkpoint, quantization, ledger)
    contract = contract_for(quantization, activations)
    if contract is None:  # go on with one that has these activations, to find what else is wrong
        homes = [row for row in CONTRACTS if row.activations is activations]
        ledger.refuse(_no_such_pair(quantization, homes))
        return homes[0]
    if args.load_format == "dummy":  # weights are made up as the contract wants them
        return contract
    if checkpoint.source not in contract.sources:
        ledger.refuse(_wrong_source(contract, checkpoint))
    if checkpoint.is_fp8 and not contract.quantizes_weights:
        _report_decoding(checkpoint, facts, ledger)
    if contract.activations is Activations.PER_TENSOR and not checkpoint.has_input_scales:
        if checkpoint.is_nvfp4:
            ledger.refuse(_no_input_scales(checkpoint))
            return contract
        ledger.decide(
            "input_scale",
            1.0,
            "this checkpoint was never calibrated; nvfp4_online scales every token instead",
        )
    return contract


def _quantization(args: LaunchArgs, checkpoint: Checkpoint, ledger: Ledger) -> Quantization:
    if args.quantization != "auto":
        ledger.decide("quantization", args.quantization, ASKED)
        return Quantization(args.quantization)
    if checkpoint.is_nvfp4:
        chosen, why = Quantization.MODELOPT_FP4, "the checkpoint is serialized NVFP4"
    elif args.model is None:
        chosen, why = Quantization.NVFP4_ONLINE, "what tetrarch is for, shown on the demo model"
    else:
        chosen, why = Quantization.NONE, f"experts stay in {checkpoint.label} unless asked"
    ledger.decide("quantization", chosen, why)
    return chosen


def _report_decoding(checkpoint: Checkpoint, facts: ModelFacts, ledger: Ledger) -> None:
    stored = facts.num_expert_params  # one byte each
    decoded = format_bytes(stored * dtype_bytes(checkpoint.dtype))
    ledger.decide(
        "expert_weights",
        checkpoint.dtype,
        f"FP8 experts are decoded while loading: {decoded} instead of {format_bytes(stored)}; "
        f"--quantization nvfp4_online would keep them in {format_bytes(stored * 9 // 16)}",
    )


def _activations(
    args: LaunchArgs, checkpoint: Checkpoint, quantization: Quantization, ledger: Ledger
) -> Activations:
    if args.moe_activations != "auto":
        ledger.decide("moe_activations", args.moe_activations, ASKED)
        return Activations(args.moe_activations)
    chosen, why = activations_of(quantization)[0], f"the default of {quantization}"
    if checkpoint.is_nvfp4 and not checkpoint.has_input_scales:
        chosen, why = Activations.BF16, f"{checkpoint.label} stores no input scales"
    ledger.decide("moe_activations", chosen, why)
    return chosen


def _no_such_pair(quantization: Quantization, homes: Sequence[QuantContract]) -> Unsupported:
    asked = homes[0].activations
    names = " or ".join(home.quantization for home in homes)
    return Unsupported(
        f"--quantization {quantization} with --moe-activations {asked} is not a contract",
        why=f"{quantization} goes with {' or '.join(activations_of(quantization))}",
        fix=f"--quantization {names}, or leave --moe-activations out",
    )


def _wrong_source(contract: QuantContract, checkpoint: Checkpoint) -> ConfigError:
    what = f"{contract.name} cannot start from a {checkpoint.label} checkpoint"
    if checkpoint.is_nvfp4:
        return ConfigError(
            what,
            why="its experts are NVFP4 already; quantizing them again would lose precision twice, "
            "and decoding them would lose what NVFP4 is for",
            fix=f"--quantization modelopt_fp4 --moe-activations {contract.activations}",
        )
    return ConfigError(
        what,
        why="under modelopt_fp4 a per-token scale is for serialized NVFP4 weights",
        fix="--quantization nvfp4_online, which quantizes while loading and scales per token",
    )


def _no_input_scales(checkpoint: Checkpoint) -> ConfigError:
    return ConfigError(
        f"{checkpoint.label} has no input scales for --moe-activations per_tensor",
        why="it was exported for weights only",
        fix="--moe-activations bf16 or per_token",
    )


def _check_sizes(contract: QuantContract, facts: ModelFacts, ledger: Ledger) -> None:
    sizes = {"hidden": facts.expert_hidden_size, "intermediate": facts.expert_intermediate_size}
    odd = [f"{name} size {size}" for name, size in sizes.items() if size % _GROUP]
    if contract.quantizes_weights and odd:
        ledger.refuse(
            Unsupported(
                f"experts of {' and '.join(odd)} cannot be NVFP4",
                why=f"{_GROUP} neighbours share one scale, so both sizes must be multiples of it",
                fix="--quantization none",
            )
        )
    if contract.quantizes_weights and not facts.num_moe_layers:
        ledger.refuse(
            Unsupported(
                f"{facts.model_type} has no experts to quantize",
                why="dense layers keep the checkpoint's precision",
                fix="--quantization none",
            )
        )


def _activation_recipe(args: LaunchArgs, contract: QuantContract, ledger: Ledger) -> Recipe | None:
    recipe = Recipe(
        int(args.four_over_six_e4m3_max), args.four_over_six_error, args.four_over_six_half_error
    )
    if args.four_over_six and contract.quantizes_activations:
        return recipe
    if args.four_over_six or recipe != Recipe():
        off = "--four-over-six is off"
        ledger.refuse(
            _no_effect(
                "--four-over-six" if args.four_over_six else "--four-over-six-*",
                f"{contract.name} does not quantize activations" if args.four_over_six else off,
            )
        )
    return None


def _fc2_input_scale(
    args: LaunchArgs, contract: QuantContract, recipe: Recipe | None, ledger: Ledger
) -> float:
    full_range = (recipe or Recipe()).token_factor
    asked = args.fc2_input_scale
    if contract.activations is not Activations.PER_TOKEN:
        if asked is not None:
            ledger.refuse(_no_effect("--fc2-input-scale", f"{contract.name} is not per token"))
        ledger.decide("fc2_input_scale", "not used", f"{contract.name} is not per token")
        return full_range
    value = ledger.pick(
        "fc2_input_scale", asked, full_range, f"1/{1 / full_range:.0f}: all of the scales' range"
    )
    if recipe and abs(value / full_range - 1) > 1e-6:
        ledger.refuse(
            ConfigError(
                f"--fc2-input-scale {value:g} does not go with --four-over-six",
                why=f"its error is measured against 1/{1 / full_range:.0f}; with another factor "
                "it ranks the two candidates wrongly",
                fix="leave one of the two out",
            )
        )
    return value


def _ignored(
    args: LaunchArgs, checkpoint: Checkpoint, contract: QuantContract, ledger: Ledger
) -> tuple[str, ...]:
    asked = args.fp4_ignored_layers
    for pattern in asked:
        if not is_pattern(pattern):
            ledger.refuse(
                ConfigError(
                    f"--fp4-ignored-layers: {pattern!r} is not a regular expression",
                    why="what follows re: does not compile",
                    fix="correct it, or give a name or a glob",
                )
            )
    if asked and not contract.quantizes_weights:
        ledger.refuse(_no_effect("--fp4-ignored-layers", f"{contract.name} quantizes nothing"))
    if not contract.quantizes_weights:
        return ()
    theirs = tuple(pattern for pattern in checkpoint.quant_ignore if is_pattern(pattern))
    why = ASKED if asked else "default"
    if theirs and contract.covers_draft:
        why += f"; the checkpoint's own {len(theirs)} exclusions do not exempt expert layers"
    elif theirs:
        why += f"; expert layers among the checkpoint's own {len(theirs)} exclusions stay as stored"
    ledger.decide("fp4_ignored_layers", ",".join(asked) or "none", why)
    return asked if contract.covers_draft else (*asked, *theirs)


def _no_effect(setting: str, why: str) -> ConfigError:
    return ConfigError(f"{setting} has no effect", why=why, fix="leave it out")
