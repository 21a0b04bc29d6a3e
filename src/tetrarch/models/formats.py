# SPDX-License-Identifier: Apache-2.0
"""How one weight is stored, told from the names, shapes and types of its parts.

A quantized weight is several tensors: codes and scales. Their names differ in the last word only,
so a weight is named once (`….down_proj.weight`) and its parts are told apart by that word. What a
weight is follows from the parts that are there; a config may claim what it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tetrarch.core.units import ceil_div
from tetrarch.models.faults import Fault
from tetrarch.models.sources import TensorHeader
from tetrarch.numerics.contract import SourceFormat

__all__ = [
    "FP8_BLOCK",
    "INPUT_SCALES",
    "NVFP4_FORMATS",
    "QUANTIZED_FORMATS",
    "StoredWeight",
    "recognise",
    "split_part",
]

FP8_BLOCK = (128, 128)  # elements that share a weight_scale_inv; the last block may be ragged

NVFP4_FORMATS = frozenset({SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED})
QUANTIZED_FORMATS = NVFP4_FORMATS | {SourceFormat.FP8_BLOCK, SourceFormat.FP8_TENSOR}

INPUT_SCALES = ("input_scale", "input_global_scale")

_PLAIN = {
    torch.bfloat16: SourceFormat.BF16,
    torch.float16: SourceFormat.FP16,
    torch.float32: SourceFormat.FP32,
}
_SCALES = {
    SourceFormat.FP8_BLOCK: ("weight_scale_inv",),
    SourceFormat.FP8_TENSOR: ("weight_scale",),
    SourceFormat.NVFP4_MODELOPT: ("weight_scale", "weight_scale_2"),
    SourceFormat.NVFP4_COMPRESSED: ("weight_scale", "weight_global_scale"),
}
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
_PARTS = frozenset(
    ("weight_packed", *INPUT_SCALES, *(part for parts in _SCALES.values() for part in parts))
)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight as a checkpoint stores it, recognised and whole."""

    name: str  # of the weight; ends in `.weight` where it is a linear's
    format: SourceFormat
    shape: tuple[int, ...]  # of the values, not of the codes
    parts: Mapping[str, str]  # last word → tensor name; the scales of the inputs included
    num_bytes: int  # as stored


def split_part(name: str) -> tuple[str, str]:
    """Split a tensor's name into its weight's name and the part it is.

    `a.down_proj.weight_scale_2` is part `weight_scale_2` of `a.down_proj.weight`; a tensor that is
    a weight of its own is part `weight` of itself.
    """
    stem, _, word = name.rpartition(".")
    return (f"{stem}.weight", word) if word in _PARTS else (name, "weight")


def recognise(
    name: str, parts: Mapping[str, tuple[str, TensorHeader]]
) -> StoredWeight | tuple[Fault, str]:
    """Tell how a weight is stored.

    Args:
        name: The weight's.
        parts: By last word: the tensor's name and header.

    Returns:
        The weight, or what is wrong with it and that in words.
    """
    headers = {part: header for part, (_, header) in parts.items()}
    payload = headers.get("weight_packed") or headers.get("weight")
    if payload is None:
        return Fault.HALF_PAIRED, f"{name}: {_and(headers)} without the weight"
    if (refused := _refusal(name, payload, headers)) is not None:
        return refused
    form = _format(payload, headers)
    scales = _SCALES.get(form, ())
    if absent := [part for part in scales if part not in headers]:
        return Fault.HALF_PAIRED, f"{name}: {payload.dtype} without its {_and(absent)}"
    known = {"weight_packed" if form is SourceFormat.NVFP4_COMPRESSED else "weight", *scales}
    if form in QUANTIZED_FORMATS:
        known |= set(INPUT_SCALES)
    if strange := sorted(set(headers) - known):
        return Fault.HALF_PAIRED, f"{name}: {payload.dtype} with a stray {_and(strange)}"
    if wrong := list(_flaws(form, payload, headers)):
        return Fault.MISMATCHED, f"{name}: {_and(wrong)}"
    shape = payload.shape
    if form in NVFP4_FORMATS:
        shape = (*shape[:-1], 2 * shape[-1])
    names = {part: tensor for part, (tensor, _) in parts.items()}
    return StoredWeight(name, form, shape, names, sum(h.num_bytes for h in headers.values()))


def _and(words: Mapping[str, object] | list[str]) -> str:
    return " and ".join(words)


def _refusal(
    name: str, payload: TensorHeader, headers: Mapping[str, TensorHeader]
) -> tuple[Fault, str] | None:
    """Name a format we know and do not load, or a type in which no weight is stored."""
    if name.endswith(".pre_quant_scale"):
        return Fault.REFUSED, f"{name}: AWQ, whose inputs are scaled per channel"
    if name.endswith(("_blocks", "_scales")) and payload.dtype == torch.uint8:
        return Fault.REFUSED, f"{name}: MXFP4"
    scale = headers.get("weight_scale") or headers.get("weight_scale_inv")
    if scale is not None and _is_micro(scale, payload):
        form = "MXFP4" if payload.dtype == torch.uint8 else "MXFP8"
        return Fault.REFUSED, f"{name}: {form} (E8M0 scales)"
    if payload.dtype == torch.float8_e4m3fn and "weight_scale" in headers:
        shape = headers["weight_scale"].shape
        if torch.Size(shape).numel() != 1:
            words = f"FP8 with scales of shape {shape}, neither per tensor nor 128x128"
            return Fault.REFUSED, f"{name}: {words}"
    if payload.dtype in (*_PLAIN, torch.uint8, torch.float8_e4m3fn):
        return None
    is_plain = payload.dtype.itemsize > 1 and "weight" in headers  # no codes of some quantization
    return Fault.WRONG_TYPE if is_plain else Fault.REFUSED, f"{name}: stored as {payload.dtype}"


def _is_micro(scale: TensorHeader, payload: TensorHeader) -> bool:
    """Tell the OCP MX formats, whose scales are exponents, from 128x128 blocks that use them."""
    exponents = scale.dtype == torch.float8_e8m0fnu
    return scale.dtype == torch.uint8 or (exponents and scale.shape != _blocks(payload.shape))


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(ceil_div(size, block) for size, block in zip(shape, FP8_BLOCK, strict=False))


def _format(payload: TensorHeader, headers: Mapping[str, TensorHeader]) -> SourceFormat:
    if payload.dtype in _PLAIN:
        return _PLAIN[payload.dtype]
    if payload.dtype == torch.float8_e4m3fn:
        per_tensor = "weight_scale" in headers
        return SourceFormat.FP8_TENSOR if per_tensor else SourceFormat.FP8_BLOCK
    packed = "weight_packed" in headers
    return SourceFormat.NVFP4_COMPRESSED if packed else SourceFormat.NVFP4_MODELOPT


def _flaws(
    form: SourceFormat, payload: TensorHeader, headers: Mapping[str, TensorHeader]
) -> Iterator[str]:
    """Yield in words which parts have the wrong shape or type."""
    if form not in QUANTIZED_FORMATS:
        return
    if len(payload.shape) != 2:
        yield f"quantized weights are matrices, this one is of shape {payload.shape}"
        return
    shapes = {"weight_scale_inv": _blocks(payload.shape)}
    if form in NVFP4_FORMATS:
        rows, num_bytes = payload.shape
        shapes = {"weight_scale": (rows, num_bytes // 8)}
        if num_bytes % 8:
            yield f"{2 * num_bytes} columns are not a multiple of 16"
    for part, header in headers.items():
        if part in ("weight", "weight_packed"):
            continue
        block_scale = part == "weight_scale" and form in NVFP4_FORMATS
        if header.dtype not in ((torch.float8_e4m3fn,) if block_scale else _SCALE_DTYPES):
            yield f"{part} is of type {header.dtype}"
        if part in shapes and header.shape != shapes[part]:
            yield f"{part} is of shape {header.shape}, expected {shapes[part]}"
        if part not in shapes and torch.Size(header.shape).numel() != 1:
            yield f"{part} is of shape {header.shape}, expected one number"
