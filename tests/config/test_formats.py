# SPDX-License-Identifier: Apache-2.0
"""Every format we read is recognised, every other one is refused by its name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tetrarch.config.formats import recognise
from tetrarch.core.errors import CheckpointError
from tetrarch.numerics.contract import SourceFormat


def quantized(**section: Any) -> dict[str, Any]:
    return {"quantization_config": section}


def hf_quant(**section: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": section}


@pytest.fixture
def compressed(golden: Path) -> dict[str, Any]:
    text = (golden / "ct_nvfp4_tiny_moe" / "quantization_config.json").read_text()
    return json.loads(text)


def test_nothing_declared_is_nothing_quantized() -> None:
    assert recognise({"model_type": "qwen3_moe"}, None) is None


@pytest.mark.parametrize(
    ("algorithm", "source", "has_scales"),
    [
        ("FP8", SourceFormat.FP8_TENSOR, True),
        ("NVFP4", SourceFormat.NVFP4_MODELOPT, True),
        ("NVFP4_AWQ", SourceFormat.NVFP4_MODELOPT, True),
        ("W4A16_NVFP4", SourceFormat.NVFP4_MODELOPT, False),
    ],
)
def test_modelopt_is_recognised_in_either_file(
    algorithm: str, source: SourceFormat, *, has_scales: bool
) -> None:
    section = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    flat = quantized(quant_method="modelopt", quant_algo=algorithm, ignore=["lm_head"])
    nested = quantized(quant_method="modelopt", quantization=section)
    for config, beside in ((flat, None), (nested, None), ({}, hf_quant(**section))):
        declared = recognise(config, beside)
        assert declared is not None
        assert declared.source is source
        assert declared.has_input_scales is has_scales
        assert declared.ignore == ("lm_head",)
        assert declared.label == f"ModelOpt {algorithm}"


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("modelopt_nvfp4_tiny_moe", SourceFormat.NVFP4_MODELOPT),
        ("modelopt_fp8_tiny_moe", SourceFormat.FP8_TENSOR),
    ],
)
def test_real_exports_are_recognised(golden: Path, folder: str, source: SourceFormat) -> None:
    config = json.loads((golden / folder / "config.json").read_text())
    beside = json.loads((golden / folder / "hf_quant_config.json").read_text())
    declared = recognise(config, beside)
    assert declared is not None
    assert declared.source is source
    assert "model.layers.0.mlp.gate" in declared.ignore


def test_compressed_tensors_nvfp4_is_recognised(compressed: dict[str, Any]) -> None:
    declared = recognise(quantized(**compressed), None)
    assert declared is not None
    assert declared.source is SourceFormat.NVFP4_COMPRESSED
    assert declared.has_input_scales


@pytest.mark.parametrize("inputs", [None, {"dynamic": True, "num_bits": 4}])
def test_compressed_tensors_without_static_scales_has_none(
    compressed: dict[str, Any], inputs: object
) -> None:
    compressed["config_groups"]["config_group_0"]["input_activations"] = inputs
    declared = recognise(quantized(**compressed), None)
    assert declared is not None
    assert not declared.has_input_scales


def test_deepseeks_fp8_is_recognised() -> None:
    declared = recognise(
        quantized(
            quant_method="fp8",
            fmt="e4m3",
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
            modules_to_not_convert=["lm_head"],
        ),
        None,
    )
    assert declared is not None
    assert declared.source is SourceFormat.FP8_BLOCK
    assert declared.ignore == ("lm_head",)


def test_kv_scales_are_reported() -> None:
    declared = recognise({}, hf_quant(quant_algo="NVFP4", kv_cache_quant_algo="FP8"))
    assert declared is not None
    assert declared.kv_quant == "FP8"
    flat = quantized(quant_method="modelopt", quant_algo="FP8", kv_cache_scheme={"num_bits": 8})
    declared = recognise(flat, None)
    assert declared is not None
    assert declared.kv_quant == "FP8"


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "mxfp8"}, "MXFP8"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "MXFP8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8 with blocks of [64, 64]"),
        ({"quant_method": "fp8"}, "fp8 with one scale per tensor"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"bits": 4}, "unnamed"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "ModelOpt MIXED_PRECISION"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "ModelOpt MXFP8"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "ModelOpt NVFP4 with group size 32",
        ),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "mixed precision"),
    ],
)
def test_other_formats_are_refused_by_name(section: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        recognise(quantized(**section), None)
    assert name in caught.value.what
    assert "nvfp4_online" in caught.value.fix


def test_compressed_tensors_of_two_formats_is_mixed(compressed: dict[str, Any]) -> None:
    other = copy.deepcopy(compressed["config_groups"]["config_group_0"])
    other["format"] = "float-quantized"
    compressed["config_groups"]["config_group_1"] = other
    with pytest.raises(CheckpointError, match="mixed precision"):
        recognise(quantized(**compressed), None)


@pytest.mark.parametrize("size", [32, 128])
def test_a_group_size_other_than_16_is_refused(compressed: dict[str, Any], size: int) -> None:
    compressed["config_groups"]["config_group_0"]["weights"]["group_size"] = size
    with pytest.raises(CheckpointError, match=f"group size {size}"):
        recognise(quantized(**compressed), None)


def test_two_files_that_contradict_each_other_are_refused() -> None:
    config = quantized(quant_method="modelopt", quant_algo="FP8")
    with pytest.raises(CheckpointError, match="name different quantizations"):
        recognise(config, hf_quant(quant_algo="NVFP4"))


@pytest.mark.parametrize("value", ["text", 5, [1], True])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("modelopt", ("quantization",)),
        ("modelopt", ("config_groups",)),
        ("modelopt", ("config_groups", "group_0")),
        ("modelopt", ("config_groups", "group_0", "weights")),
        ("modelopt", ("kv_cache_scheme",)),
        ("modelopt", ("ignore",)),
        ("fp8", ("modules_to_not_convert",)),
        ("compressed-tensors", ("config_groups",)),
        ("compressed-tensors", ("config_groups", "group_0")),
        ("compressed-tensors", ("config_groups", "group_0", "weights")),
        ("compressed-tensors", ("config_groups", "group_0", "input_activations")),
        ("compressed-tensors", ("kv_cache_scheme",)),
        ("compressed-tensors", ("ignore",)),
    ],
)
def test_a_field_of_another_kind_is_named(method: str, path: tuple[str, ...], value: Any) -> None:
    section: dict[str, Any] = {
        "quant_method": method,
        "quant_algo": "NVFP4",
        "format": "nvfp4-pack-quantized",
        "weight_block_size": [128, 128],
    }
    holder = section
    for name in path[:-1]:
        holder = holder.setdefault(name, {})
    holder[path[-1]] = value
    with pytest.raises(CheckpointError, match=f"the checkpoint's {path[-1]} is"):
        recognise({"quantization_config": section}, None)


@pytest.mark.parametrize("value", ["text", 5, [1], True])
def test_a_quantization_that_is_no_object_is_named(value: Any) -> None:
    for name in ("quantization_config", "compression_config"):
        with pytest.raises(CheckpointError, match=name):
            recognise({name: value}, None)
    with pytest.raises(CheckpointError, match="quantization"):
        recognise({}, {"quantization": value})
