# SPDX-License-Identifier: Apache-2.0
"""A model on `meta` gets memory: slots for what checkpoints hold, values for what they do not."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tetrarch.core.errors import CheckpointError
from tetrarch.core.specs import TensorSpec
from tetrarch.memory.slots import SlotTable
from tetrarch.models.surgery import joints_of, neighbours

__all__ = ["materialise", "shorten_lookups"]

# The routers' balancing bias is added to scores in (0, 1) and BF16 would round it to 1/256;
# DeepSeek-V3's class declares it FP32, MiniMax-M2's does not.
_ALWAYS_FP32 = ("e_score_correction_bias",)


def materialise(
    model: PreTrainedModel, weights: SlotTable, *, dtype: torch.dtype, device: torch.device
) -> SlotTable:
    """Give every dense parameter and buffer its memory; ours already have theirs."""
    slots = _allocate(model, weights, islands=_fp32_islands(model, dtype), device=device)
    given = {
        meta: nn.Parameter(slot, requires_grad=False)  # one, where parameters are tied
        for meta, slot in slots.items()
        if isinstance(meta, nn.Parameter)
    }
    for path, module in model.named_modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, given[meta])
        for name, meta in list(module.named_buffers(recurse=False)):
            if meta in slots:
                module.register_buffer(name, slots[meta])
            else:
                value = _rebuilt(module, path).get_buffer(name).to(device)
                module.register_buffer(name, value, persistent=False)
    for joint in joints_of(model):
        joint.bind()
    return weights


def _allocate(
    model: PreTrainedModel, weights: SlotTable, *, islands: re.Pattern[str], device: torch.device
) -> dict[Tensor, Tensor]:
    """Return each dense parameter and persistent buffer, on `meta`, and its slot."""
    metas = {meta: name for name, meta in reversed(model.state_dict(keep_vars=True).items())}
    specs = {
        name: TensorSpec(
            tuple(meta.shape), torch.float32 if islands.search(name) else meta.dtype, device
        )
        for meta, name in reversed(metas.items())  # of a tied one, the first name
    }
    together = neighbours(model)
    for name, spec in specs.items():
        if name not in together:
            weights.allocate(name, spec)
        elif name not in weights:
            weights.allocate_rows({each: specs[each] for each in together[name]})
    return {meta: weights[name] for meta, name in metas.items()}


def shorten_lookups(model: nn.Module) -> None:
    """Let every module find its weights and children as plain attributes.

    torch keeps them in tables that it searches, in Python, once the plain lookup has failed:
    170 times a step of the demo model, one twentieth of it. What the tables hold is final here,
    because weights are written in place.
    """
    for module in model.modules():
        for table in ("_parameters", "_buffers", "_modules"):
            vars(module).update(vars(module)[table])


def _fp32_islands(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return what matches the names of parameters that stay FP32 in a narrower model.

    transformers has two lists: one for FP16 alone, a strict one for BF16 as well.
    """
    patterns = {*_ALWAYS_FP32, *(model._keep_in_fp32_modules_strict or ())}  # pyright: ignore[reportPrivateUsage]
    if dtype == torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())  # pyright: ignore[reportPrivateUsage]
    return re.compile("|".join(sorted(patterns)))


def _rebuilt(module: nn.Module, path: str) -> nn.Module:
    """Build a module again off `meta`, for the buffers that no checkpoint holds (`inv_freq`)."""
    config = vars(module).get("config")
    if config is None or any(True for _ in module.parameters()):
        raise CheckpointError(
            f"cannot compute the buffers of {path!r}",
            why=f"{type(module).__name__} is not built from a configuration alone",
            fix="serve another model",
        )
    return type(module)(config)
