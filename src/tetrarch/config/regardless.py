# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the settings whatever the checkpoint, the model or the device turn out to be.

A checkpoint that cannot be read must not hide that `--tp-size 2` is refused too. The unknown is
taken for whatever suits the settings best: what is still refused then, is wrong in any case.
"""

from __future__ import annotations

from itertools import product

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import Checkpoint
from tetrarch.config.hardware import Arch, Device
from tetrarch.config.headers import WeightScan
from tetrarch.config.plan import ModelFacts
from tetrarch.config.resolve import resolve
from tetrarch.core.errors import LaunchErrors, TetrarchError
from tetrarch.numerics.contract import SourceFormat

__all__ = ["refused_regardless"]

_LONG = 1 << 40  # tokens; no setting reaches it


def refused_regardless(
    args: LaunchArgs,
    *,
    checkpoint: Checkpoint | None = None,
    facts: ModelFacts | None = None,
    device: Device | None = None,
) -> list[TetrarchError]:
    """Return what no checkpoint, model or device could make right; `None` stands for unknown."""
    known = product(
        [checkpoint] if checkpoint else _CHECKPOINTS,
        [facts] if facts else _FACTS,
        [device] if device else _DEVICES,
    )
    return min((_refused(args, *one) for one in known), key=len)


def _refused(
    args: LaunchArgs, checkpoint: Checkpoint, facts: ModelFacts, device: Device
) -> list[TetrarchError]:
    try:
        resolve(args, checkpoint, facts, device)
    except LaunchErrors as error:
        return list(error.errors)
    return []


_CHECKPOINTS = [
    Checkpoint(
        path="",
        config={},
        source=source,
        label=source.upper(),
        dtype="bfloat16",
        quant_ignore=(),
        has_input_scales=has_scales,
        kv_quant=None,
        weights=WeightScan(),
    )
    for source in SourceFormat
    for has_scales in (False, True)
]
_FACTS = [
    ModelFacts(
        model_type="",
        architectures=(),
        num_layers=1,
        num_moe_layers=1,
        num_experts=1,
        top_k=1,
        hidden_size=16,
        expert_hidden_size=16,
        expert_intermediate_size=16,
        vocab_size=_LONG,
        context_len=context,
        num_dense_params=1,
        num_expert_params=1,
        kv_elements_per_token=1,
        num_mtp_layers=1,
    )
    for context in (1, _LONG)
]
_DEVICES = [
    Device(
        arch=arch,
        name="",
        torch_device="cpu" if arch is Arch.CPU else "cuda",
        num_devices=1,
        memory_bytes=_LONG,
        physical_cores=1,
    )
    for arch in Arch
]
