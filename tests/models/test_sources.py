# SPDX-License-Identifier: Apache-2.0
"""Headers tell everything about a checkpoint before a tensor is read; damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tetrarch.core.errors import CheckpointError
from tetrarch.models.sources import SafetensorsSource, TensorSource, reading_order

TENSORS = {
    "model.layers.10.w": torch.arange(6.0).reshape(2, 3),
    "model.layers.2.w": torch.ones(4, dtype=torch.bfloat16),
    "model.norm.weight": torch.zeros(3, dtype=torch.float8_e4m3fn),
}


def _sharded(folder: Path) -> Path:
    """Two shards in an order that is not the reading order."""
    first = {"model.layers.10.w": TENSORS["model.layers.10.w"]}
    second = {name: value for name, value in TENSORS.items() if name not in first}
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_headers_are_complete_before_anything_is_read(tmp_path: Path) -> None:
    source = SafetensorsSource(_sharded(tmp_path))
    assert {
        name: (header.shape, header.dtype, header.num_bytes)
        for name, header in source.headers.items()
    } == {
        "model.layers.10.w": ((2, 3), torch.float32, 24),
        "model.layers.2.w": ((4,), torch.bfloat16, 8),
        "model.norm.weight": ((3,), torch.float8_e4m3fn, 3),
    }


def test_numbers_in_names_count(tmp_path: Path) -> None:
    source = SafetensorsSource(_sharded(tmp_path))
    order = reading_order(source.headers)
    assert order == ["model.layers.2.w", "model.layers.10.w", "model.norm.weight"]
    for name, tensor in source.read(order):
        assert torch.equal(tensor.float(), TENSORS[name].float())


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert set(SafetensorsSource(tmp_path).headers) == set(TENSORS)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 20, 100])
def test_a_truncated_file_is_damaged(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="damaged"):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (_sharded(tmp_path) / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (_sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        SafetensorsSource(tmp_path)


def test_an_index_that_promises_more_than_its_shards_hold_is_refused(tmp_path: Path) -> None:
    path = _sharded(tmp_path) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.3.w"] = "a.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 tensors.*") as caught:
        SafetensorsSource(tmp_path)
    assert "model.layers.3.w in a.safetensors" in caught.value.why


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    save_file(TENSORS, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        SafetensorsSource(folder)


def test_live_tensors_are_a_source_too() -> None:
    source = TensorSource(TENSORS)
    assert source.headers["model.layers.2.w"].num_bytes == 8
    [(name, tensor)] = source.read(["model.norm.weight"])
    assert name == "model.norm.weight"
    assert tensor is TENSORS["model.norm.weight"]
