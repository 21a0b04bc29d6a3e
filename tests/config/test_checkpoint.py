# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder is described without reading a weight, or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tetrarch.config.checkpoint import demo_model_path, read_checkpoint, read_end_ids
from tetrarch.core.errors import CheckpointError
from tetrarch.numerics.contract import SourceFormat


def test_the_demo_model_is_bf16(demo_path: Path) -> None:
    checkpoint = read_checkpoint(demo_model_path())
    assert Path(checkpoint.path) == demo_path
    assert checkpoint.source is SourceFormat.BF16
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.weights.num_bytes > 15_000_000
    assert not checkpoint.is_nvfp4
    assert not checkpoint.is_fp8


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("modelopt_nvfp4_tiny_moe", SourceFormat.NVFP4_MODELOPT),
        ("modelopt_fp8_tiny_moe", SourceFormat.FP8_TENSOR),
    ],
)
def test_real_exports_are_described(golden: Path, folder: str, source: SourceFormat) -> None:
    checkpoint = read_checkpoint(str(golden / folder))
    assert checkpoint.source is source
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.has_input_scales
    assert checkpoint.is_nvfp4 is (source is SourceFormat.NVFP4_MODELOPT)
    assert checkpoint.is_fp8 is (source is SourceFormat.FP8_TENSOR)


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        (torch.bfloat16, SourceFormat.BF16),
        (torch.float16, SourceFormat.FP16),
        (torch.float32, SourceFormat.FP32),
    ],
)
def test_the_files_say_what_the_weights_are(
    folder: Callable[..., Path], dtype: torch.dtype, source: SourceFormat
) -> None:
    path = folder(config={"dtype": "bfloat16"})
    save_file({"w": torch.zeros(4, 4, dtype=dtype)}, path / "model.safetensors")
    checkpoint = read_checkpoint(str(path))
    assert checkpoint.source is source
    assert checkpoint.dtype == "bfloat16"  # what config.json asks hidden states to be


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, "bfloat16"),
    ],
)
def test_without_weights_the_config_says_it(
    folder: Callable[..., Path], config: dict[str, object], dtype: str
) -> None:
    checkpoint = read_checkpoint(str(folder(config=config)))
    assert checkpoint.dtype == dtype


@pytest.mark.parametrize("value", ["int7", "float64", "BF16", "torch.bfloat16", "", 5, ["x"], {}])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_type_that_we_cannot_compute_in_is_refused(
    folder: Callable[..., Path], field: str, value: object
) -> None:
    for config in ({field: value}, {"dtype": "bfloat16", "text_config": {field: value}}):
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(str(folder(config=config)))
        assert field in caught.value.what
        assert repr(value) in caught.value.what
        assert "bfloat16, float16, float32" in caught.value.why


def test_end_tokens_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    assert read_end_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 6}}')
    assert read_end_ids(tmp_path) == {5, 6}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_end_ids(tmp_path) == {5, 6, 7, 8}
    (tmp_path / "config.json").write_text('{"eos_token_id": null, "text_config": null}')
    assert read_checkpoint(str(tmp_path)).end_ids == {7, 8}


@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("value", ["2", -1, 2.0, True, {"id": 2}, [[2]], ["2"], [None], [2, -1]])
def test_an_end_token_that_is_none_is_named_with_its_file(
    folder: Callable[..., Path], file: str, value: object
) -> None:
    path = folder(**({"config": {}} | {file: {"eos_token_id": value}}))
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(str(path))
    assert f"eos_token_id in {file}.json" in caught.value.what


@pytest.mark.parametrize("name", ["generation_config", "hf_quant_config"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_damaged_file_beside_the_config_is_named(
    folder: Callable[..., Path], name: str, text: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{name}.json"):
        read_checkpoint(str(folder(config={}, **{name: text})))


def test_quantized_weights_that_nobody_explains_are_refused(folder: Callable[..., Path]) -> None:
    path = folder(config={"dtype": "bfloat16"})
    save_file({"w": torch.zeros(4, 4, dtype=torch.uint8)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the weights are U8"):
        read_checkpoint(str(path))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_checkpoint(str(tmp_path / "absent"))


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="it is a file"):
        read_checkpoint(str(tmp_path / "model.gguf"))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00"])
def test_a_damaged_config_is_refused(folder: Callable[..., Path], text: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_checkpoint(str(folder(config=text)))
