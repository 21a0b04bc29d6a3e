# SPDX-License-Identifier: Apache-2.0
"""`tetrarch checksum [MODEL] [settings]`: what a server of this checkpoint would hold, as digests.

A server that was started with the same settings, or has been updated to the same checkpoint,
reports the same at /weights_checker.
"""

from __future__ import annotations

import json

import torch

from tetrarch.commands.bars import Bars
from tetrarch.config.cli import Reading
from tetrarch.config.launch import plan_launch
from tetrarch.config.plan import Plan
from tetrarch.core.log import configure_logging
from tetrarch.core.progress import NoProgress, Progress
from tetrarch.memory.checksum import combine
from tetrarch.models.build import build_model
from tetrarch.models.describe import describe
from tetrarch.models.fetch import fetch
from tetrarch.models.load import first_load
from tetrarch.models.readback import checksums

__all__ = ["measure", "run"]


def run(reading: Reading) -> int:
    """Load, print JSON, and return the exit status.

    Raises:
        TetrarchError: What is wrong with the launch or the checkpoint.
    """
    configure_logging(level="warning")
    plan = plan_launch(reading, describe=describe, fetch=fetch)
    with Bars() as bars:
        found = measure(plan, progress=bars)
    print(json.dumps({"checksum": combine(found), "checksums": found}, indent=2))
    return 0


def measure(plan: Plan, *, progress: Progress | None = None) -> dict[str, str]:
    """Load the weights of a plan, and return their digests by name.

    Raises:
        CheckpointError: They do not fit the model.
    """
    device = torch.device(plan.device.torch_device)
    if device.type == "cpu":
        torch.set_num_threads(plan.num_threads)
    model = build_model(plan, device=device)
    first_load(model, plan, progress or NoProgress())
    return checksums(model)
