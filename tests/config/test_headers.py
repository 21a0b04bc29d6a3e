# SPDX-License-Identifier: Apache-2.0
"""Safetensors headers, read without the library and compared with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tetrarch.config.headers import read_header, read_headers, scan_weights
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
    scan = scan_weights(read_headers(tmp_path))
    assert scan.dense_elements == 8 * 32 + 4 * 32 + 2 * 32
    assert scan.dense_bytes == 8 * 16 + 4 * 32 + 2 * 32
    assert scan.dtype == "U8"
    assert scan.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_shards_are_counted_together_and_strangers_are_not(tmp_path: Path) -> None:
    index: dict[str, str] = {}
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated"):
        save_file({f"w.{name}": torch.zeros(8)}, tmp_path / f"{name}.safetensors")
        index[f"w.{name}"] = f"{name}.safetensors"
    del index["w.consolidated"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert scan_weights(read_headers(tmp_path)).num_bytes == 2 * 8 * 4
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert scan_weights(read_headers(tmp_path)).num_bytes == 2 * 4


def test_a_folder_without_weights_counts_nothing(tmp_path: Path) -> None:
    scan = scan_weights(read_headers(tmp_path))
    assert (scan.num_bytes, scan.dtype, scan.dense_elements) == (0, "", 0)


def file_of(header: object, payload: bytes = b"") -> bytes:
    """Return the bytes of a file with this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(first: int, last: int, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(last - first) // 4], "data_offsets": [first, last]} | changes


def test_a_file_without_tensors_or_with_empty_ones_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"__metadata__": {"format": "pt"}}))
    assert list(read_header(path)) == []
    path.write_bytes(file_of({"a": entry(0, 4), "b": entry(4, 4), "c": entry(4, 8)}, b"8 bytes."))
    assert [header.num_bytes for header in read_header(path)] == [4, 0, 4]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "requires a buffer of 8 bytes"),
        (b"short", "requires a buffer of 8 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "names a header"),
        ((9).to_bytes(8, "little") + b"not json!", "Expecting value"),
        ((500).to_bytes(8, "little") + b"{}", "a header of 500 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "a header of 9223372036854775808 bytes"),
        (b"\xff" * 64, "a header of"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "codec can't decode"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "recursion"),
        (file_of([1]), "not a JSON object"),
        (file_of({"a": 5}), "does not say what a is"),
        (file_of({"a": {"dtype": "F32"}}), "does not say what a is"),
        (file_of({"a": entry(0, 4, dtype=4)}, b"1234"), "does not say what a is"),
        (file_of({"a": entry(0, 4, data_offsets=[0, "4"])}, b"1234"), "does not say what a is"),
        (file_of({"a": entry(0, 4, shape=["1"])}, b"1234"), "shape ('1',)"),
        (file_of({"a": entry(0, 4, shape=[-1])}, b"1234"), "shape (-1,)"),
        (file_of({"a": entry(0, 4, shape=[True])}, b"1234"), "shape (True,)"),
        (file_of({"a": entry(0, 4, shape=[2])}, b"1234"), "takes 8 bytes"),
        (file_of({"a": entry(0, 8)}, b"1234"), "names 8 bytes of tensors, and 4 are there"),
        (file_of({"a": entry(0, 4)}, b"12345678"), "names 4 bytes of tensors, and 8 are there"),
        (file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "overlap"),
        (file_of({"a": entry(0, 4), "b": entry(8, 12)}, b"123456789012"), "a gap at byte 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_not_safetensors_is_named(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged") as caught:
        scan_weights(read_headers(tmp_path))
    assert words in caught.value.why
    with pytest.raises(Exception):  # noqa: B017, PT011 -- the library's own, of several kinds
        safe_open(path, "pt")
