# SPDX-License-Identifier: Apache-2.0
"""Safetensors headers, read without the library and compared with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tetrarch.config.headers import read_header, scan_weights
from tetrarch.core.errors import CheckpointError

E4M3 = torch.float8_e4m3fn


def test_headers_agree_with_the_library(golden: Path) -> None:
    path = golden / "modelopt_nvfp4_tiny_moe" / "model.safetensors"
    ours = {header.name: header for header in read_header(path)}
    with safe_open(path, "pt") as theirs:
        assert set(ours) == set(theirs.keys())
        for name, header in ours.items():
            view = theirs.get_slice(name)
            assert (header.dtype, list(header.shape)) == (view.get_dtype(), view.get_shape())
            tensor = theirs.get_tensor(name)
            assert header.num_bytes == tensor.numel() * tensor.element_size()


def test_dense_matrices_that_are_quantized_are_counted(tmp_path: Path) -> None:
    tensors = {
        "layers.0.self_attn.q_proj.weight": torch.zeros(8, 16, dtype=torch.uint8),
        "layers.0.self_attn.q_proj.weight_scale": torch.zeros(8, 2, dtype=E4M3),
        "layers.0.self_attn.o_proj.weight": torch.zeros(4, 32, dtype=E4M3),
        "layers.0.mlp.shared_experts.up_proj.weight": torch.zeros(2, 32, dtype=E4M3),
        "layers.0.mlp.experts.0.up_proj.weight": torch.zeros(99, 16, dtype=torch.uint8),
        "layers.0.norm.weight": torch.zeros(32, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    scan = scan_weights(tmp_path)
    assert scan.dense_elements == 8 * 32 + 4 * 32 + 2 * 32
    assert scan.dense_bytes == 8 * 16 + 4 * 32 + 2 * 32
    assert scan.dtype == "U8"
    assert scan.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_shards_are_counted_together_and_strangers_are_not(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated"):
        save_file({"w": torch.zeros(8)}, tmp_path / f"{name}.safetensors")
    assert scan_weights(tmp_path).num_bytes == 2 * 8 * 4
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert scan_weights(tmp_path).num_bytes == 2 * 4


def test_a_folder_without_weights_counts_nothing(tmp_path: Path) -> None:
    scan = scan_weights(tmp_path)
    assert (scan.num_bytes, scan.dtype, scan.dense_elements) == (0, "", 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        (9).to_bytes(8, "little") + b"not json!",
        (500).to_bytes(8, "little") + b"{}",
    ],
    ids=["empty", "short", "git-lfs", "not json", "cut"],
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        scan_weights(tmp_path)
