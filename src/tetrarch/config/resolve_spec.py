# SPDX-License-Identifier: Apache-2.0
"""Settle speculation: how much is drafted, by which weights, and what these are made of."""

from __future__ import annotations

from dataclasses import replace

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.drafts import DRAFT, DraftCheckpoint, DraftScan
from tetrarch.config.headers import TensorHeader
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.patterns import is_pattern, matches
from tetrarch.config.plan import ModelFacts, QuantPlan, SpecPlan
from tetrarch.core.errors import CheckpointError, ConfigError, TetrarchError
from tetrarch.numerics.contract import Activations, QuantContract, Quantization, contract_for

__all__ = ["resolve_draft_quant", "resolve_speculation"]

_STEPS = 3  # drafted before each verification
_PACKED = "U8"  # the type of serialized NVFP4 codes in a header
_PLAIN = {"BF16", "F16", "F32"}
_TAKES_PLAIN = (Quantization.NVFP4_ONLINE, Quantization.NONE)
_FLAG = "--speculative-draft-quantization"
_FIELDS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_draft_model_path",
    "speculative_draft_quantization",
    "speculative_adaptive",
)


def resolve_speculation(
    args: LaunchArgs,
    checkpoint: Checkpoint,
    facts: ModelFacts,
    ledger: Ledger,
    *,
    draft: DraftCheckpoint | None,
) -> SpecPlan | None:
    """Settle drafting; everything that counts tokens takes the result.

    Args:
        args: What was asked for.
        checkpoint: The target's; holds the draft where no other checkpoint is named.
        facts: What the target is.
        ledger: Takes decisions and refusals.
        draft: The other checkpoint, where one is named and could be read.
    """
    algorithm = args.speculative_algorithm
    if algorithm is None or algorithm == "none":
        _refuse_details(args, ledger)
        if facts.num_mtp_layers:
            ledger.decide("mtp_layers", "not loaded", "speculation is off")
        return None
    ledger.decide("speculative_algorithm", algorithm, ASKED)
    steps = _steps(args, ledger)
    ledger.decide("speculative_eagle_topk", 1, "a draft is a chain")
    _decide_adaptive(args, steps, ledger)
    if args.speculative_draft_model_path is None:
        ledger.decide("speculative_draft_model_path", "not set", "the model's own MTP layer drafts")
        _check_embedded(checkpoint, facts, ledger)
    elif draft is not None:
        ledger.decide("speculative_draft_model_path", draft.path, ASKED)
        _check_separate(draft, facts, ledger)
    if facts.num_mtp_layers > 1:
        count = f"the first of {facts.num_mtp_layers}"
        ledger.decide("mtp_layers", count, "it drafts every token; the others are not loaded")
    return SpecPlan(
        algorithm=algorithm,
        num_steps=steps,
        num_draft_tokens=steps + 1,
        adaptive=args.speculative_adaptive,
        draft_path=draft.path if draft is not None else args.speculative_draft_model_path,
    )


def resolve_draft_quant(
    args: LaunchArgs, spec: SpecPlan | None, scan: DraftScan, quant: QuantPlan, ledger: Ledger
) -> QuantPlan:
    """Let the draft's experts inherit the target's contract, or say why they do not.

    Online quantization binds them whatever the checkpoint's own exclusions say; the operator's
    patterns exempt them. Else each is what its tensors are, unless it is to be quantized.

    Args:
        args: What was asked for.
        spec: Whether there is a draft at all.
        scan: The headers of the draft's tensors; empty where no weights are there yet.
        quant: The target's.
        ledger: Takes decisions and refusals.
    """
    if spec is None:
        return quant
    target, asked = quant.contract, args.speculative_draft_quantization
    _check_contradictions(target, asked, scan, ledger)
    if scan.linears:
        plain = scan.linears <= _PLAIN
        why = "as stored" if plain else "decoded while loading, as the model's own"
        ledger.decide("draft_linears", "/".join(sorted(scan.linears)).lower(), why)
    if not scan.experts:
        ledger.decide("draft_experts", target.name, "the target's contract")
        return quant
    stored = next(iter(scan.experts.values())).dtype
    packed, as_stored = stored == _PACKED, f"{stored.lower()} as stored"
    if _is_exempt(args, scan):
        ledger.decide("draft_experts", as_stored, "--fp4-ignored-layers names them")
        return replace(quant, ignored_layers=(*quant.ignored_layers, DRAFT.removesuffix(".")))
    wanted = _wanted(target, asked, packed=packed)
    contract = target if wanted == target.quantization else _another(wanted, target)
    why = f"under {contract.name}"
    if packed:
        ledger.decide("draft_experts", "serialized nvfp4", why)
    elif not contract.quantizes_weights:
        ledger.decide("draft_experts", as_stored, why)
    else:
        if target.covers_draft:
            why += ", whatever the checkpoint excludes"
        elif contract.activations is Activations.PER_TENSOR:
            why += "; it was never calibrated, so its input scale is 1"
        ledger.decide("draft_experts", "quantized online", why)
    return replace(quant, draft=contract)


def _refuse_details(args: LaunchArgs, ledger: Ledger) -> None:
    said = [
        "--" + field.replace("_", "-")
        for field in _FIELDS
        if vars(args)[field] not in (None, False, "auto")
    ]
    if said:
        ledger.refuse(
            ConfigError(
                f"{' and '.join(said)} without --speculative-algorithm",
                why="nothing is drafted, so it would have no effect",
                fix="add --speculative-algorithm MTP, or leave it out",
            )
        )
    for field in ("speculative_algorithm", *_FIELDS):
        ledger.decide(field, "not used", "nothing is drafted")


def _decide_adaptive(args: LaunchArgs, steps: int, ledger: Ledger) -> None:
    if args.speculative_adaptive:
        why = f"{ASKED}; from 0 to {steps} drafts, as many as pay: /server_info tells how many"
    else:
        why = f"always {steps} drafts"
    ledger.decide("speculative_adaptive", "on" if args.speculative_adaptive else "off", why)


def _steps(args: LaunchArgs, ledger: Ledger) -> int:
    """Settle the length of a chain; a chain of n drafts is verified as n + 1 tokens."""
    steps, tokens = args.speculative_num_steps, args.speculative_num_draft_tokens
    if tokens == 1 or (steps and tokens and tokens != steps + 1):
        ledger.refuse(
            ConfigError(
                f"--speculative-num-draft-tokens {tokens} does not go with "
                f"{f'--speculative-num-steps {steps}' if steps else 'drafting'}",
                why="each step drafts one token, and the drafts are verified with the token before "
                "them: one more than there are steps",
                fix=f"--speculative-num-draft-tokens {(steps or 1) + 1}, or leave it out",
            )
        )
    settled = steps or (tokens - 1 if tokens else _STEPS)
    why = "one less than the tokens verified" if tokens else "the default of one MTP layer"
    ledger.decide("speculative_num_steps", settled, ASKED if steps else why)
    why = ASKED if tokens else "the steps and the token before them"
    ledger.decide("speculative_num_draft_tokens", settled + 1, why)
    return max(settled, 1)


def _check_embedded(checkpoint: Checkpoint, facts: ModelFacts, ledger: Ledger) -> None:
    planned = not checkpoint.weights.num_bytes and facts.num_mtp_layers
    if checkpoint.draft or planned:
        return
    announced = f"config.json announces {facts.num_mtp_layers}" if facts.num_mtp_layers else ""
    ledger.refuse(
        ConfigError(
            f"{facts.model_type} here has no MTP layer to draft with",
            why=f"no tensor is named mtp.* or model.layers.{facts.num_layers}.eh_proj.*"
            + (f", though {announced}" if announced else ""),
            fix="leave --speculative-algorithm out, or name the folder of a draft: "
            "--speculative-draft-model-path",
        )
    )


def _check_separate(draft: DraftCheckpoint, facts: ModelFacts, ledger: Ledger) -> None:
    """A draft of another model would be as wrong as noise, and nobody would see why it is slow."""
    ours = {
        "model_type": facts.model_type,
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
    }
    differing = [
        f"{key} is {draft.fields[key]!r}, the model's {value!r}"
        for key, value in ours.items()
        if draft.fields.get(key, value) != value
    ]
    if differing:
        ledger.refuse(
            CheckpointError(
                f"{draft.path} does not hold a draft of this model",
                why="in its config.json " + "; ".join(differing),
                fix="name a draft of the same family, hidden size and vocabulary",
            )
        )
    elif not draft.draft:
        ledger.refuse(
            CheckpointError(
                f"{draft.path} holds no MTP layer of this model",
                why=f"no tensor is named mtp.* or model.layers.{facts.num_layers}.eh_proj.*",
                fix="name a whole checkpoint with MTP tensors, or a folder with these alone",
            )
        )


def _wanted(target: QuantContract, asked: str, *, packed: bool) -> Quantization:
    if asked != "auto":
        return Quantization(asked)
    if target.covers_draft:
        return target.quantization
    return Quantization.MODELOPT_FP4 if packed else Quantization.NONE


def _another(wanted: Quantization, target: QuantContract) -> QuantContract:
    """Return the contract of a draft whose weights come from elsewhere than the target's.

    Inputs are rounded as the target's are. Static scales go with serialized weights only, and
    modelopt_fp4 takes plain ones as well.
    """
    if wanted is Quantization.NONE:
        return contract_for(wanted) or target
    return contract_for(wanted, target.activations) or target


def _is_exempt(args: LaunchArgs, scan: DraftScan) -> bool:
    patterns = [pattern for pattern in args.fp4_ignored_layers if is_pattern(pattern)]
    return any(matches(pattern, layer) for pattern in patterns for layer in scan.layers)


def _check_contradictions(
    target: QuantContract, asked: str, scan: DraftScan, ledger: Ledger
) -> None:
    """Refuse what the tensors are not, and what the one contract does not allow."""
    if target.covers_draft and asked not in ("auto", target.quantization):
        ledger.refuse(_two_contracts(target, asked, scan))
    packed = [header for header in scan.experts.values() if header.dtype == _PACKED]
    plain = [header for header in scan.experts.values() if header.dtype != _PACKED]
    if packed and plain:
        ledger.refuse(
            CheckpointError(
                "the draft's experts are stored in two ways",
                why=f"{packed[0].name} is NVFP4, {plain[0].name} is {plain[0].dtype}",
                fix="export the draft again, all of its experts alike",
            )
        )
    elif asked == Quantization.MODELOPT_FP4 and plain:
        ledger.refuse(_not_what_it_is(asked, plain[0], f"{_FLAG} auto"))
    elif packed and (target.covers_draft or asked in _TAKES_PLAIN):
        said = target.quantization if asked == "auto" else asked
        fix = "name a draft that is not quantized" if target.covers_draft else f"{_FLAG} auto"
        ledger.refuse(_not_what_it_is(said, packed[0], fix))


def _two_contracts(target: QuantContract, asked: str, scan: DraftScan) -> TetrarchError:
    why = f"{target.quantization} binds target and draft alike"
    first = next((one for one in scan.experts.values() if one.dtype != _PACKED), None)
    if first is not None:
        why += f": {_stored(first)} and becomes {_PACKED} {_codes_shape(first)} as the target's do"
    return ConfigError(
        f"{_FLAG} {asked} contradicts --quantization {target.quantization}",
        why=why,
        fix="leave it out; --fp4-ignored-layers mtp exempts the draft",
    )


def _not_what_it_is(asked: str, header: TensorHeader, fix: str) -> TetrarchError:
    if asked == Quantization.MODELOPT_FP4:
        expected = f"serialized NVFP4, here {_PACKED} {_codes_shape(header)}"
    else:
        expected = f"not quantized yet, here BF16 {(*header.shape[:-1], 2 * header.shape[-1])}"
    return CheckpointError(
        f"the draft cannot be {asked}: {_stored(header)}",
        why=f"{asked} expects weights that are {expected}",
        fix=f"{fix}: what its tensors are decides",
    )


def _stored(header: TensorHeader) -> str:
    kind = f"serialized NVFP4, {_PACKED}" if header.dtype == _PACKED else header.dtype
    return f"{header.name} is stored as {kind} {header.shape}"


def _codes_shape(header: TensorHeader) -> tuple[int, ...]:
    """Return the shape of a plain matrix as codes, two a byte."""
    return (*header.shape[:-1], header.shape[-1] // 2)
