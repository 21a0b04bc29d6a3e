# SPDX-License-Identifier: Apache-2.0
"""A file or a field that is not what it must be is refused by name."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tetrarch.config.files import (
    field_error,
    is_file,
    is_folder,
    names_in,
    object_in,
    open_file,
    read_object,
)
from tetrarch.core.errors import CheckpointError

NOBODY = 65534


@pytest.fixture
def locked() -> Iterator[Path]:
    """A readable folder with a file that we may not read and a folder we may not look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "config.json").write_text("{}")
    (folder / "inner").mkdir()
    (folder / "config.json").chmod(0)
    (folder / "inner").chmod(0)
    is_root = os.geteuid() == 0  # who may read everything
    if is_root:
        os.seteuid(NOBODY)
    yield folder
    if is_root:
        os.seteuid(0)
    (folder / "inner").chmod(0o700)
    shutil.rmtree(folder)


def test_what_we_may_not_read_is_named_with_what_to_do(locked: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read") as caught:
        read_object(locked / "config.json")
    assert "Permission denied" in caught.value.why
    assert caught.value.fix == "check its permissions"
    for ask in (is_file, is_folder, read_object):
        with pytest.raises(CheckpointError, match="permissions"):
            ask(locked / "inner" / "config.json")


def test_a_name_that_is_too_long_is_no_path(tmp_path: Path) -> None:
    for ask in (is_file, is_folder):
        with pytest.raises(CheckpointError, match="too long"):
            ask(tmp_path / ("a" * 5000))


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("absent", "link"):
        assert read_object(tmp_path / name) is None
        assert not is_file(tmp_path / name)
        assert not is_folder(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\x00", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"\xef\xbb\xbf{}", "cannot be read"),
        (b'{"a": 1}]', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
        (b"[1, 2]", "it holds a list"),
        (b'"a"', "it holds a text"),
        (b"1.5", "it holds a number"),
        (b"true", "it holds a boolean"),
        (b"null", "it holds null"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_object(path)
    assert str(path) in caught.value.what


def test_a_folder_in_a_files_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="directory"):
        read_object(tmp_path)


def test_fields_are_what_they_must_be_or_absent() -> None:
    holder = {"o": {"a": 1}, "n": ["a", "b"], "null": None}
    assert object_in(holder, "o") == {"a": 1}
    assert names_in(holder, "n") == ("a", "b")
    for absent in ("null", "nothing"):
        assert object_in(holder, absent) == {}
        assert names_in(holder, absent) == ()


@pytest.mark.parametrize("value", ["text", 5, True, ["a"], [5]])
def test_a_field_of_another_kind_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint's x is"):
        object_in({"x": value}, "x")
    if value != ["a"]:
        with pytest.raises(CheckpointError, match="must be a list of texts"):
            names_in({"x": value}, "x")


def test_a_long_value_is_not_quoted() -> None:
    assert "x is a text" in field_error("x", "a" * 100, "short").what
    assert "x is an object" in field_error("x", {"a": "a" * 100}, "short").what


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe, endless, folder = (tmp_path / name for name in ("pipe", "endless", "folder"))
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    folder.mkdir()
    for path in (pipe, endless, folder):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_object(path)
        with pytest.raises(OSError, match=r"no ordinary file|Is a directory"):
            open_file(path)


def test_a_json_file_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room on the disk
    with pytest.raises(CheckpointError, match="more than any JSON of a checkpoint"):
        read_object(path)
