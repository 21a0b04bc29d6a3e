# SPDX-License-Identifier: Apache-2.0
"""From settings to a plan: the same few steps for every command and for the offline door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint, demo_model_path, read_checkpoint
from tetrarch.config.cli import Reading
from tetrarch.config.drafts import read_draft
from tetrarch.config.hardware import Device, detect
from tetrarch.config.ledger import Ledger
from tetrarch.config.plan import ModelFacts, Plan
from tetrarch.config.regardless import refused_regardless
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import LaunchErrors

__all__ = ["plan_launch"]


def plan_launch(
    reading: Reading,
    *,
    describe: Callable[[str], ModelFacts],
    fetch: Callable[[str], str | Path] = str,
    device: Device | None = None,
) -> Plan:
    """Resolve a launch, without loading weights.

    Args:
        reading: What was said, and what was wrong with it.
        describe: Counts a model; `tetrarch.models.describe.describe`, which this floor may not
            import.
        fetch: Turns a hub name into a local folder, and leaves a folder alone.
        device: What it runs on; detected by default.

    Raises:
        LaunchErrors: Everything that is wrong with this launch.
    """
    args, ledger = reading.args, Ledger(reading.errors)
    found = ledger.attempt(lambda: device or detect(args.device))
    checkpoint = ledger.attempt(lambda: _read(args, fetch))
    facts = ledger.attempt(lambda: describe(checkpoint.path)) if checkpoint else None
    path, draft = args.speculative_draft_model_path, None
    if facts is not None and path is not None and args.speculative_algorithm == "mtp":
        layers = facts.num_layers
        draft = ledger.attempt(lambda: read_draft(str(fetch(path)), num_layers=layers))
    if found is None or checkpoint is None or facts is None:
        more = refused_regardless(args, checkpoint=checkpoint, facts=facts, device=found)
        raise LaunchErrors([*ledger.errors, *more])
    return resolve(args, checkpoint, facts, found, draft=draft, earlier=ledger.errors)


def _read(args: LaunchArgs, fetch: Callable[[str], str | Path]) -> Checkpoint:
    """Describe the checkpoint; of one whose weights are made up, config.json alone counts."""
    path = demo_model_path() if args.model is None else str(fetch(args.model))
    return read_checkpoint(path, {} if args.load_format == "dummy" else None)
