# SPDX-License-Identifier: Apache-2.0
"""Digests of a checkpoint, without a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tetrarch.__main__ import main
from tetrarch.commands.checksum import measure
from tetrarch.config.plan import Plan
from tetrarch.memory.checksum import combine
from tetrarch.numerics.contract import Quantization


def perturbed(source: Path, folder: Path, *, name: str) -> Path:
    """Copy a checkpoint and change one value of one tensor."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[0] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_one_value_changes_one_digest_and_the_whole(
    demo_path: Path, tmp_path: Path, make_plan: Callable[..., Plan]
) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    other = perturbed(demo_path, tmp_path / "other", name=name)
    before, after = measure(make_plan(demo_path)), measure(make_plan(other))
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == [
        "model.layers.2.mlp.experts.gate_up"
    ]
    assert combine(before) != combine(after)
    quantized = measure(make_plan(demo_path, quantization=Quantization.NVFP4_ONLINE))
    assert quantized["lm_head.weight"] == before["lm_head.weight"]
    assert quantized != before


def test_it_prints_json(demo_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checksum", str(demo_path), "--device", "cpu", "--threads", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["checksum"] == combine(told["checksums"])
    assert told["checksums"]["model.norm.weight"]
    assert len(told["checksum"]) == 32
