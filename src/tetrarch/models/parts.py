# SPDX-License-Identifier: Apache-2.0
"""Hold the parts of one weight until it is whole, then put it together.

Codes and scales arrive as separate tensors and in any order. What leaves here is a tensor of
values, or an NVFP4 matrix whose scales decode, whatever the dialect of the checkpoint was.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.models.formats import FP8_BLOCK, NVFP4_FORMATS, StoredWeight
from tetrarch.moe.types import Nvfp4Matrix
from tetrarch.numerics import fp8, nvfp4
from tetrarch.numerics.contract import SourceFormat

__all__ = ["PartCollector", "Parts", "assemble", "decode"]

Parts = dict[str, Tensor]  # last word of the name → tensor


class PartCollector:
    """Collect tensors into whole weights; holds nothing of a weight that has left.

    Lives as long as one load: what a failed load left behind cannot meet the next one.
    """

    def __init__(self, weights: Iterable[StoredWeight]) -> None:
        """Expect these weights."""
        self._expected = {weight.name: weight for weight in weights}
        self._place = {
            tensor: (weight.name, part)
            for weight in self._expected.values()
            for part, tensor in weight.parts.items()
        }
        self._waiting: dict[str, Parts] = {}

    def add(self, name: str, tensor: Tensor) -> tuple[StoredWeight, Parts] | None:
        """Take one tensor; return its weight with all parts if this was the last of them."""
        owner, part = self._place[name]
        parts = self._waiting.setdefault(owner, {})
        parts[part] = tensor
        if len(parts) < len(self._expected[owner].parts):
            return None
        return self._expected.pop(owner), self._waiting.pop(owner)

    def unfinished(self) -> list[str]:
        """Return the weights that are not whole yet."""
        return list(self._expected)


def assemble(
    weight: StoredWeight, parts: Parts, *, dtype: torch.dtype, device: torch.device
) -> Tensor | Nvfp4Matrix:
    """Put a weight together.

    Args:
        weight: What it is.
        parts: All of its parts, anywhere.
        dtype: Of the values of FP8; a plain weight keeps its own.
        device: Where the result shall be; a scale that is one number stays
            where it is.

    Returns:
        Values, or an NVFP4 matrix.

    Raises:
        CheckpointError: A scale is not a positive finite number.
    """
    _check_scales(weight, parts)

    def on(part: str) -> Tensor:
        return parts[part].to(device)

    def number(part: str) -> Tensor:
        return parts[part].reshape(()).float()

    match weight.format:
        case SourceFormat.FP8_BLOCK:
            scale = on("weight_scale_inv")
            return fp8.decode_block(on("weight"), scale, block=FP8_BLOCK, dtype=dtype)
        case SourceFormat.FP8_TENSOR:
            return fp8.decode_tensor(on("weight"), on("weight_scale"), dtype)
        case SourceFormat.NVFP4_MODELOPT:
            input_scale = number("input_scale") if "input_scale" in parts else None
            return Nvfp4Matrix(
                on("weight"), on("weight_scale"), number("weight_scale_2"), input_scale
            )
        case SourceFormat.NVFP4_COMPRESSED:  # its second-level scales encode
            has_input = "input_global_scale" in parts
            return Nvfp4Matrix(
                on("weight_packed"),
                on("weight_scale"),
                number("weight_global_scale").reciprocal(),
                number("input_global_scale").reciprocal() if has_input else None,
            )
        case _:
            return on("weight")


def decode(value: Tensor | Nvfp4Matrix, dtype: torch.dtype) -> Tensor:
    """Return plain values: what a dense linear computes with."""
    if isinstance(value, Nvfp4Matrix):
        return nvfp4.decode(
            value.codes, value.block_scale, global_scale=value.global_scale, dtype=dtype
        )
    return value.to(dtype)


def _check_scales(weight: StoredWeight, parts: Parts) -> None:
    """Refuse what would turn a whole expert, or every token that visits it, into NaN.

    A zero scale is an all-zero block in FP8; in NVFP4 it comes with NaN block scales or stands for
    an infinite one. Block scales of NVFP4 themselves are left to the stager.
    """
    least = torch.finfo(torch.float32).tiny if weight.format in NVFP4_FORMATS else 0.0
    for part, tensor in parts.items():
        if part in ("weight", "weight_packed") or tensor.dtype == torch.float8_e4m3fn:
            continue
        scale = tensor.float()
        if not bool((torch.isfinite(scale) & (scale >= least)).all()):
            raise CheckpointError(
                f"{weight.parts[part]} is not a positive finite number",
                why="values are multiplied or divided by it, so the layer would compute NaN or 0",
                fix="export the checkpoint again, calibrated with data that reaches every expert",
            )
