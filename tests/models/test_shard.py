# SPDX-License-Identifier: Apache-2.0
"""A file that shrinks, changes or cannot be read is an error, and never a signal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tetrarch.core.errors import CheckpointError
from tetrarch.models.shard import Shard

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(CONTENT)
    return file


@pytest.mark.parametrize(("offset", "count"), [(0, 1), (3, 1000), (16000, 384), (5, 0)])
def test_bytes_come_from_where_they_are_asked_for(path: Path, offset: int, count: int) -> None:
    octets = Shard(path).read("w", offset, count)
    assert bytes(octets.tolist()) == CONTENT[offset : offset + count]
    octets += 1  # they are the caller's own
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_file_cut_short_after_it_was_opened_is_noticed(path: Path, size: int) -> None:
    shard = Shard(path)
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=r"changed while|cannot be read"):
        shard.read("w", 50, 6000)
    with pytest.raises(CheckpointError, match="cannot be read") as refused:
        shard.read("w", len(CONTENT) - 10, 20)
    assert "ends too early" in refused.value.why


def test_a_file_written_over_in_place_is_noticed(path: Path) -> None:
    shard = Shard(path)
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))  # a coarse clock may give both writes one time
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        shard.read("w", 0, 10)


def test_a_file_replaced_or_removed_under_its_name_is_still_the_one_that_was_opened(
    path: Path, tmp_path: Path
) -> None:
    shard = Shard(path)
    other = tmp_path / "other"
    other.write_bytes(bytes(len(CONTENT)))
    other.replace(path)
    assert bytes(shard.read("w", 0, 256).tolist()) == CONTENT[:256]
    path.unlink()
    assert bytes(shard.read("w", 0, 256).tolist()) == CONTENT[:256]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere cannot be read"):
        Shard(tmp_path / "nowhere")
