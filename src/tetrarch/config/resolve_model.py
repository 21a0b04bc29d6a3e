# SPDX-License-Identifier: Apache-2.0
"""Settle which model, under what name and type, and behind which door."""

from __future__ import annotations

from pathlib import Path

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.files import TOKENIZER_CONFIG
from tetrarch.config.ledger import ASKED, Ledger
from tetrarch.config.plan import ModelFacts, ModelPlan, ServePlan
from tetrarch.core.errors import CheckpointError, ConfigError
from tetrarch.core.units import format_bytes

__all__ = ["resolve_model", "resolve_serve"]

_DEMO_NAME = "tetrarch-demo"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def resolve_model(
    args: LaunchArgs, checkpoint: Checkpoint, facts: ModelFacts, ledger: Ledger
) -> ModelPlan:
    """Settle path, name, type and context."""
    ledger.decide("model", checkpoint.path, "the embedded demo model" if not args.model else ASKED)
    load_format = "dummy" if args.load_format == "dummy" else "safetensors"
    why = "answers mean nothing" if load_format == "dummy" else "the only format of checkpoints"
    ledger.decide("load_format", load_format, why)
    if load_format != "dummy" and not checkpoint.weights.num_bytes:
        ledger.decide("weights", "none yet", "planned by config.json alone; serving needs them")
    asked = None if args.dtype == "auto" else args.dtype
    dtype = ledger.pick("dtype", asked, checkpoint.dtype, "the checkpoint's")
    context = ledger.pick(
        "context_length", args.context_length, facts.context_len, "the model's own"
    )
    if context > facts.context_len:
        ledger.refuse(
            ConfigError(
                f"--context-length {context} is longer than the model knows",
                why=f"config.json says {facts.context_len} positions; later ones were never "
                "trained",
                fix=f"--context-length {facts.context_len}, or a longer rope in config.json",
            )
        )
    if strange := sorted(end for end in checkpoint.end_ids if end >= facts.vocab_size):
        ledger.refuse(
            CheckpointError(
                f"eos_token_id names {strange}, and the vocabulary has {facts.vocab_size} tokens",
                why="the model can never say it, so no output would end by itself",
                fix="correct eos_token_id in config.json and generation_config.json",
            )
        )
    if checkpoint.kv_quant:
        ledger.decide("kv_cache_dtype", dtype, f"{checkpoint.kv_quant} scales are not used")
    _report_dense(checkpoint, dtype, ledger)
    return ModelPlan(
        path=checkpoint.path,
        tokenizer_path=_tokenizer_path(args, checkpoint, ledger),
        served_name=_served_name(args, ledger),
        dtype=dtype,
        context_len=context,
        facts=facts,
        load_format=load_format,
    )


def _tokenizer_path(args: LaunchArgs, checkpoint: Checkpoint, ledger: Ledger) -> str | None:
    if args.skip_tokenizer_init:
        texts = {"--tokenizer-path": args.tokenizer_path, "--chat-template": args.chat_template}
        for flag in (flag for flag, value in texts.items() if value is not None):
            ledger.refuse(
                ConfigError(
                    f"{flag} has no effect",
                    why="--skip-tokenizer-init serves token ids only",
                    fix="leave one of the two out",
                )
            )
        ledger.decide("tokenizer_path", "none", "--skip-tokenizer-init: token ids only")
        return None
    own = checkpoint.path
    is_dummy = args.load_format == "dummy"
    if args.tokenizer_path is None and is_dummy and not (Path(own) / TOKENIZER_CONFIG).is_file():
        ledger.decide("tokenizer_path", "none", "the folder has none: token ids only")
        return None
    return ledger.pick("tokenizer_path", args.tokenizer_path, own, "the model's own")


def _served_name(args: LaunchArgs, ledger: Ledger) -> str:
    default = args.model or _DEMO_NAME
    why = "MODEL as it was given" if args.model else "the embedded demo model"
    name = ledger.pick("served_model_name", args.served_model_name, default, why)
    if ":" in name:
        ledger.refuse(
            ConfigError(
                f"--served-model-name {name!r} holds a colon",
                why="clients use the colon to name an adapter of a model",
                fix="--served-model-name with another name",
            )
        )
    return name


def _report_dense(checkpoint: Checkpoint, dtype: str, ledger: Ledger) -> None:
    weights = checkpoint.weights
    if not weights.dense_elements:
        return
    decoded = weights.dense_elements * (4 if dtype == "float32" else 2)
    ledger.decide(
        "dense_weights",
        dtype,
        f"linears stored as {checkpoint.label} are decoded while loading: "
        f"{format_bytes(decoded)} instead of {format_bytes(weights.dense_bytes)}",
    )


def resolve_serve(args: LaunchArgs, model: ModelPlan, ledger: Ledger) -> ServePlan:
    """Settle the HTTP door."""
    if not args.enable_metrics:
        ledger.refuse(
            ConfigError(
                "--no-enable-metrics: metrics are always on",
                why="they cost next to nothing, and /metrics answers to no key",
                fix="leave it out",
            )
        )
    if args.chat_template is not None and not Path(args.chat_template).is_file():
        ledger.refuse(
            ConfigError(
                f"--chat-template: there is no file {args.chat_template!r}",
                why="it names a Jinja file",
                fix="check the path, or leave it out for the tokenizer's own template",
            )
        )
    if args.host not in _LOOPBACK and args.api_key is None:
        ledger.decide("host", args.host, "reachable from other machines, and no --api-key is set")
    return ServePlan(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        chat_template=args.chat_template,
        log_level=args.log_level,
        incremental_streaming=args.incremental_streaming_output,
        allow_auto_truncate=args.allow_auto_truncate,
        stream_interval=args.stream_interval,
        max_body_bytes=args.max_body_bytes,
        weights_root=_weights_root(args, model, ledger),
    )


def _weights_root(args: LaunchArgs, model: ModelPlan, ledger: Ledger) -> str:
    """Settle what an update of the weights may read, symlinks resolved."""
    if args.weights_root is not None:
        root, why = Path(args.weights_root).expanduser().resolve(), ASKED
        if not root.is_dir():
            ledger.refuse(
                ConfigError(
                    f"--weights-root: there is no folder {args.weights_root!r}",
                    why="it bounds which checkpoints an update of the weights may read",
                    fix="check the path; / allows every folder",
                )
            )
    elif args.host in _LOOPBACK:
        root, why = Path("/"), "any folder: only this machine reaches the server"
    else:
        root, why = Path(model.path).resolve().parent, "beside the model: others reach the server"
        if root.name == "snapshots":  # of the hub's cache, whose files are links to ../blobs
            root = root.parent
    ledger.decide("weights_root", root, why)
    return str(root)
