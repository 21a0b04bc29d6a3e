# SPDX-License-Identifier: Apache-2.0
"""What a quantization config means, for every producer whose checkpoints we read.

Known: DeepSeek FP8 in blocks of 128 x 128, ModelOpt FP8 and NVFP4 (also AWQ and W4A16), and
compressed-tensors `nvfp4-pack-quantized`. Everything else is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tetrarch.config.files import names_in, object_in
from tetrarch.core.errors import CheckpointError
from tetrarch.numerics.contract import SourceFormat

__all__ = ["Declared", "recognise"]

_GROUP = 16  # elements that share a block scale: the format's, not a setting
_FP8_BLOCK = [128, 128]
_MODELOPT = {
    "FP8": SourceFormat.FP8_TENSOR,
    "NVFP4": SourceFormat.NVFP4_MODELOPT,
    "NVFP4_AWQ": SourceFormat.NVFP4_MODELOPT,
    "W4A16_NVFP4": SourceFormat.NVFP4_MODELOPT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """How a checkpoint says its weights are stored.

    Attributes:
        label: The producer's own name for it, for people.
        ignore: The producer's list of modules it left alone.
        has_input_scales: Static activation scales are stored beside the weights.
        kv_quant: What the KV cache was calibrated for, or `None`; we keep KV in the model's type.
    """

    source: SourceFormat
    label: str
    ignore: tuple[str, ...] = ()
    has_input_scales: bool = False
    kv_quant: str | None = None


def recognise(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> Declared | None:
    """Return what the checkpoint declares; `None` where nothing is quantized.

    Args:
        config: `config.json`.
        hf_quant: ModelOpt's `hf_quant_config.json`, where there is one.

    Raises:
        CheckpointError: A format that we refuse, or two files that contradict each other.
    """
    section = object_in(config, "quantization_config") or object_in(config, "compression_config")
    if not section:
        return None if hf_quant is None else _modelopt(object_in(hf_quant, "quantization"))
    method = str(section.get("quant_method", "unnamed"))
    if method.startswith("modelopt"):
        declared = _modelopt(object_in(section, "quantization") or section)
        other = declared if hf_quant is None else _modelopt(object_in(hf_quant, "quantization"))
        if other.source != declared.source:
            raise CheckpointError(
                "config.json and hf_quant_config.json name different quantizations",
                why=f"one says {declared.label}, the other {other.label}",
                fix="download both files again from the same revision",
            )
        return declared
    if method == "fp8":
        return _fp8(section)
    if method == "compressed-tensors":
        return _compressed(section)
    raise _refused(method, f"quant_method {method!r} is not one that tetrarch reads")


def _modelopt(section: Mapping[str, Any]) -> Declared:
    algorithm = str(section.get("quant_algo"))
    label = f"ModelOpt {algorithm}"
    if algorithm == "MIXED_PRECISION":
        raise _refused(label, "its layers are quantized in different ways")
    if algorithm not in _MODELOPT:
        raise _refused(label, f"known are {', '.join(_MODELOPT)}")
    if algorithm != "FP8":
        _check_group(label, section)
    return Declared(
        source=_MODELOPT[algorithm],
        label=label,
        ignore=names_in(section, "ignore") or names_in(section, "exclude_modules"),
        has_input_scales=algorithm != "W4A16_NVFP4",
        kv_quant=section.get("kv_cache_quant_algo") or _scheme(section),
    )


def _check_group(name: str, section: Mapping[str, Any]) -> None:
    for weights in (section, *(object_in(group, "weights") for group in _groups(section))):
        size = weights.get("group_size", _GROUP)
        if size != _GROUP:
            raise _refused(
                f"{name} with group size {size}", f"NVFP4 has one scale per {_GROUP} elements"
            )


def _fp8(section: Mapping[str, Any]) -> Declared:
    block = section.get("weight_block_size")
    if block == [1, 32]:
        raise _refused("MXFP8", "weights share one power-of-two scale per 32 elements")
    if block != _FP8_BLOCK:
        layout = f"blocks of {block}" if block else "one scale per tensor or channel"
        raise _refused(f"fp8 with {layout}", "DeepSeek's blocks of [128, 128] are known")
    return Declared(
        source=SourceFormat.FP8_BLOCK,
        label="FP8 in blocks of 128 x 128",
        ignore=names_in(section, "modules_to_not_convert"),
    )


def _compressed(section: Mapping[str, Any]) -> Declared:
    groups = _groups(section)
    formats = {str(group.get("format") or section.get("format")) for group in groups}
    formats = formats or {str(section.get("format"))}
    if len(formats) > 1 or section.get("format") == "mixed-precision":
        raise _refused(
            "compressed-tensors mixed precision", "its layers are quantized in different ways"
        )
    (name,) = formats
    if name != "nvfp4-pack-quantized":
        raise _refused(f"compressed-tensors {name}", "only nvfp4-pack-quantized is known")
    _check_group(name, section)
    inputs = [object_in(group, "input_activations") for group in groups]
    return Declared(
        source=SourceFormat.NVFP4_COMPRESSED,
        label=f"compressed-tensors {name}",
        ignore=names_in(section, "ignore"),
        has_input_scales=all(each and each.get("dynamic") is not True for each in inputs),
        kv_quant=_scheme(section),
    )


def _scheme(section: Mapping[str, Any]) -> str | None:
    scheme = object_in(section, "kv_cache_scheme")
    return f"FP{scheme.get('num_bits', 8)}" if scheme else None


def _groups(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = object_in(section, "config_groups")
    return [object_in(groups, name) for name in groups]


def _refused(name: str, why: str) -> CheckpointError:
    title = name.upper() if name in ("mxfp4", "mxfp8") else name
    return CheckpointError(
        f"checkpoints in {title} are not supported",
        why=why,
        fix="use the model's BF16 or FP8-block checkpoint with --quantization nvfp4_online, or an "
        "NVFP4 checkpoint from ModelOpt or compressed-tensors",
    )
