# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint says it is, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from tetrarch.config.drafts import DraftScan, scan_draft
from tetrarch.config.files import field_error, is_file, is_folder, object_in, read_object
from tetrarch.config.formats import Declared, recognise
from tetrarch.config.generation import read_chat_defaults
from tetrarch.config.headers import TensorHeader, WeightScan, read_headers, scan_weights
from tetrarch.config.sizes import check_sizes
from tetrarch.core.errors import CheckpointError
from tetrarch.numerics.contract import SourceFormat

__all__ = ["Checkpoint", "demo_model_path", "read_checkpoint", "read_end_ids"]

_PLAIN = {"BF16": SourceFormat.BF16, "F16": SourceFormat.FP16, "F32": SourceFormat.FP32}
_NAMES = {
    SourceFormat.BF16: "bfloat16",
    SourceFormat.FP16: "float16",
    SourceFormat.FP32: "float32",
}
# Types of quantized weights, of which some exporters speak here; or no type at all.
_FOR_OTHERS = ("float8_e4m3fn", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder, described.

    Attributes:
        path: The folder.
        config: `config.json`.
        source: What the expert weights are stored as.
        label: The same in the producer's words.
        dtype: Type of the weights that are not quantized, as torch names it.
        quant_ignore: The producer's list of modules it left alone.
        has_input_scales: Static activation scales are stored beside the weights.
        kv_quant: What the KV cache was calibrated for, or `None`.
        weights: The tensors, counted; zeros where the folder holds none.
        end_ids: The tokens that end an output.
        draft: The first MTP layer, where there is one.
    """

    path: str
    config: Mapping[str, Any]
    source: SourceFormat
    label: str
    dtype: str
    quant_ignore: tuple[str, ...]
    has_input_scales: bool
    kv_quant: str | None
    weights: WeightScan
    end_ids: frozenset[int] = frozenset()
    draft: DraftScan = DraftScan()

    @property
    def is_nvfp4(self) -> bool:
        """Whether the expert weights are serialized NVFP4."""
        return self.source in (SourceFormat.NVFP4_MODELOPT, SourceFormat.NVFP4_COMPRESSED)

    @property
    def is_fp8(self) -> bool:
        """Whether the expert weights are stored in FP8."""
        return self.source in (SourceFormat.FP8_BLOCK, SourceFormat.FP8_TENSOR)


def demo_model_path() -> str:
    """Return the folder of the demo checkpoint that ships with the package."""
    return str(resources.files("tetrarch") / "demo_model")


def read_checkpoint(path: str, headers: Mapping[str, TensorHeader] | None = None) -> Checkpoint:
    """Describe the checkpoint in a local folder.

    Args:
        path: The folder.
        headers: Its tensors, where they have been read: of a large model that takes a second.

    Raises:
        CheckpointError: The folder or its `config.json` is missing, a file is damaged, a size,
            type or sampling parameter is none, or the weights are in a format that we refuse.
    """
    folder = Path(path)
    if not is_folder(folder):
        raise CheckpointError(
            f"there is no checkpoint folder {path!r}",
            why="it is a file" if is_file(folder) else "no such folder",
            fix="check the path; the name of a model on the hub is organisation/model",
        )
    config = read_object(folder / "config.json")
    if config is None:
        raise CheckpointError(
            f"{path} holds no config.json",
            why="a Hugging Face checkpoint describes its model there",
            fix="name the folder that holds config.json and the .safetensors files; GGUF and "
            "original-format checkpoints must be converted",
        )
    check_sizes(config, folder / "config.json")
    read_chat_defaults(folder)  # only serving samples by them, but no command shall find it right
    declared = recognise(config, read_object(folder / "hf_quant_config.json"))
    headers = read_headers(folder) if headers is None else headers
    weights = scan_weights(headers)
    text = object_in(config, "text_config") or config
    described = _checkpoint(folder, config, declared or _undeclared(config, weights), weights)
    draft = scan_draft(headers, num_layers=int(text.get("num_hidden_layers") or 0))
    return replace(described, draft=draft)


def _checkpoint(
    folder: Path, config: Mapping[str, Any], declared: Declared, weights: WeightScan
) -> Checkpoint:
    return Checkpoint(
        path=str(folder),
        config=config,
        source=declared.source,
        label=declared.label,
        dtype=_config_dtype(config) or _NAMES.get(declared.source, "bfloat16"),
        quant_ignore=declared.ignore,
        has_input_scales=declared.has_input_scales,
        kv_quant=declared.kv_quant,
        weights=weights,
        end_ids=read_end_ids(folder),
    )


def _undeclared(config: Mapping[str, Any], weights: WeightScan) -> Declared:
    if weights.dtype and weights.dtype not in _PLAIN:
        raise CheckpointError(
            f"the weights are {weights.dtype}, and nothing says what they mean",
            why="config.json has no quantization_config, and there is no hf_quant_config.json",
            fix="download the whole checkpoint, config.json included",
        )
    by_name = {name: source for source, name in _NAMES.items()}
    configured = by_name.get(_config_dtype(config), SourceFormat.BF16)
    source = _PLAIN.get(weights.dtype, configured)
    return Declared(source=source, label=source.upper())


def _config_dtype(config: Mapping[str, Any]) -> str:
    """Return the type that a config names for what is not quantized; empty where it names none."""
    found = ""
    for section in (config, object_in(config, "text_config")):
        for field in ("dtype", "torch_dtype"):
            name = section.get(field)
            if name is not None and name not in (*_NAMES.values(), *_FOR_OTHERS):
                expected = f"one of {', '.join(_NAMES.values())}"
                raise field_error(f"{field} in config.json", name, expected)
            if name in _NAMES.values():
                found = found or str(name)
    return found


def read_end_ids(folder: Path) -> frozenset[int]:
    """Return the end tokens that a checkpoint's configuration names; none without files.

    Raises:
        CheckpointError: A file cannot be read, or what it names is no token id.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = read_object(folder / name) or {}
        for section in (config, object_in(config, "text_config")):
            named = section.get("eos_token_id")
            listed = cast("list[object]", named if isinstance(named, list) else [named])
            for one in listed:
                if type(one) is int and one >= 0:
                    ids.add(one)
                elif one is not None or listed is named:
                    expected = "a token id, a list of them, or null"
                    raise field_error(f"eos_token_id in {name}", named, expected)
    return frozenset(ids)
