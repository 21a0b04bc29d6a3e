# SPDX-License-Identifier: Apache-2.0
"""A source knows its tensors before it reads one, and says what is wrong with its files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tetrarch.core.errors import CheckpointError
from tetrarch.models.sources import SafetensorsSource, TensorSource, reading_order

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, Tensor]:
    return {f"layers.{layer}.up.weight": torch.full((2, 3), float(layer)) for layer in range(12)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Even layers in one shard, odd ones in the other."""
    index: dict[str, str] = {}
    for shard, name in enumerate(SHARDS):
        part = {key: value for key, value in tensors().items() if value[0, 0] % 2 == shard}
        save_file(part, tmp_path / name)
        index |= dict.fromkeys(part, name)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return tmp_path


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_headers_are_known_without_reading(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    assert set(source.headers) == set(tensors())
    header = source.headers["layers.3.up.weight"]
    assert (header.shape, header.dtype, header.file) == ((2, 3), torch.float32, SHARDS[1])
    assert header.num_bytes == 24
    assert source.name == str(sharded)


def test_tensors_come_in_the_order_asked_for_whatever_their_shard(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    names = reading_order(source.headers)
    read = list(source.read(names))
    assert [name for name, _ in read] == [f"layers.{layer}.up.weight" for layer in range(12)]
    assert all(torch.equal(value, tensors()[name]) for name, value in read)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    stored = {"a": torch.ones(2, dtype=torch.float8_e4m3fn), "b": torch.tensor(2.0)}
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.headers["a"].dtype == torch.float8_e4m3fn
    assert source.headers["b"].shape == ()
    assert dict(source.read(["b"]))["b"] == 2


def test_a_file_that_shrinks_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """Mapped, it would end the process: SIGBUS."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 18), "b": torch.ones(1 << 18)}, path)
    source = SafetensorsSource(tmp_path)
    os.truncate(path, 4096)
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match=f"{name} in .* cannot be read"):
            list(source.read([name]))


def test_a_file_that_is_written_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    source = SafetensorsSource(tmp_path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        list(source.read(["a"]))


def test_a_file_replaced_under_its_name_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    source = SafetensorsSource(tmp_path)
    path.unlink()
    save_file({"a": torch.ones(4)}, path)
    assert dict(source.read(["a"]))["a"].sum() == 0


def test_a_layers_experts_and_a_weights_parts_are_neighbours() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{leaf}"
        for layer in (2, 10)
        for expert in (2, 10, 100)
        for part in ("down", "gate", "up")
        for leaf in ("input_scale", "weight", "weight_scale", "weight_scale_2")
    ]
    shuffled = random.Random(0).sample(names, len(names))
    assert reading_order(shuffled) == names


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / SHARDS[1]).unlink(), [SHARDS[1], "is missing"]),
        (lambda f: truncate(f / SHARDS[1]), [SHARDS[1], "is damaged"]),
        (lambda f: (f / SHARDS[1]).write_bytes(b""), [SHARDS[1], "is damaged"]),
        (lambda f: (f / SHARDS[1]).write_bytes(b"\xff" * 64), [SHARDS[1], "is damaged"]),
        (lambda f: (f / SHARDS[1]).write_text("version https://git-lfs"), [SHARDS[1], "damaged"]),
        (lambda f: (f / INDEX).unlink(), ["no safetensors weights"]),
        (lambda f: (f / INDEX).write_text("{"), [INDEX, "cannot be read"]),
        (lambda f: (f / INDEX).write_bytes(b"\xff\xff"), [INDEX, "cannot be read"]),
        (lambda f: (f / INDEX).write_text("[" * 100_000), [INDEX, "cannot be read"]),
        (lambda f: (f / INDEX).write_text("[]"), [INDEX, "is not a JSON object"]),
        (lambda f: (f / INDEX).write_text("{}"), [INDEX, "no weight_map"]),
        (
            lambda f: edit_index(f, lambda index: index.update({"layers.1.up.weight": 5})),
            [INDEX, "layers.1.up.weight into 5"],
        ),
        *(
            (
                lambda f, to=to: edit_index(f, lambda index: index.update({"layers.0.x": to})),
                [INDEX, f"layers.0.x into {to}", "outside the folder"],
            )
            for to in ("../other.safetensors", "/tmp/other.safetensors", f"a/{SHARDS[0]}", "..")
        ),
        (
            lambda f: ((f / SHARDS[1]).unlink(), (f / SHARDS[1]).symlink_to("nowhere")),
            [SHARDS[1], "is missing", "a link that leads nowhere"],
        ),
        (
            lambda f: ((f / SHARDS[1]).unlink(), (f / SHARDS[1]).mkdir()),
            [SHARDS[1], "is missing"],
        ),
        (lambda f: (f / INDEX).write_text('{"weight_map": []}'), [INDEX, "is damaged"]),
        (
            lambda f: edit_index(f, lambda index: index.update({"layers.99.x": SHARDS[0]})),
            [INDEX, "1 tensors", f"layers.99.x in {SHARDS[0]}"],
        ),
        (
            lambda f: edit_index(f, lambda index: index.update({"layers.1.up.weight": SHARDS[0]})),
            [INDEX, "1 tensors", f"layers.1.up.weight in {SHARDS[0]}"],
        ),
        (lambda f: save_file(tensors(), f / SHARDS[1]), ["layers.0.up.weight twice", *SHARDS]),
    ],
)
def test_damaged_files_are_named(
    sharded: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(sharded)
    assert [word for word in words if word not in str(caught.value)] == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def test_a_type_that_torch_lacks_is_named(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    content = len(header).to_bytes(8, "little") + header + b"\0\0"
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is of type F4"):
        SafetensorsSource(tmp_path)


def test_live_tensors_are_a_source_too() -> None:
    source = TensorSource(tensors())
    assert source.headers["layers.3.up.weight"].shape == (2, 3)
    assert [float(value[0, 0]) for _, value in source.read(["layers.3.up.weight"])] == [3.0]
    assert source.name == "live tensors"
