# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.models import shared_file
from tetrarch.models.shared_file import SharedFile, open_shared

NAME = b"/torch_7_8_9"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight bytes as torch shares them: two references, the sender's and one for a receiver."""
    monkeypatch.setattr(shared_file, "_SHARED", tmp_path)
    made = tmp_path / NAME.decode()[1:]
    made.write_bytes(struct.pack("i60x", 2) + bytes(range(8)))
    return made


def references(file: Path) -> int:
    return struct.unpack("i", file.read_bytes()[:4])[0]


def test_the_bytes_are_read_and_the_reference_is_given_back(file: Path) -> None:
    assert open_shared(NAME, 8).copied(2, 5).tolist() == [2, 3, 4]
    assert references(file) == 1
    assert file.read_bytes()[64:] == bytes(range(8))


def test_the_last_reference_removes_the_file(file: Path) -> None:
    SharedFile(file, 8, mentions=2).copied(0, 0)
    assert not file.exists()


def test_more_mentions_than_references_remove_it_too(file: Path) -> None:
    SharedFile(file, 8, mentions=9).copied(0, 8)
    assert not file.exists()


@pytest.mark.parametrize("length", [0, 3, 64, 71])
def test_a_file_that_was_cut_short_is_an_error_not_a_signal(file: Path, length: int) -> None:
    opened = open_shared(NAME, 8)
    os.truncate(file, length)
    with pytest.raises(RequestError, match="cannot be read"):
        opened.copied(0, 8)


def test_a_file_that_is_gone_is_an_error(file: Path) -> None:
    opened = open_shared(NAME, 8)
    file.unlink()
    with pytest.raises(RequestError, match="cannot be read"):
        opened.copied(0, 8)
    with pytest.raises(RequestError, match="cannot be read"):
        open_shared(NAME, 8)


def test_a_claim_beyond_the_file_is_refused(file: Path) -> None:
    with pytest.raises(RequestError, match="claims 9 bytes; its shared memory holds 8"):
        open_shared(NAME, 9)


@pytest.mark.parametrize(
    "name",
    [
        *(b"", b"/", b"torch_7_8_9", b"/torch_", b"/torch_7/8", b"/torch_../x", b"/psm_1"),
        *(b"/torch_\0", b"/torch_7_8_9\n", b"/torch_" + b"1" * 61, b"/\xff"),
    ],
)
@pytest.mark.usefixtures("file")
def test_a_name_that_torch_does_not_give_is_refused(name: bytes) -> None:
    with pytest.raises(RequestError, match="no name of shared memory"):
        open_shared(name, 0)


def test_a_link_is_not_followed(file: Path) -> None:
    target = file.rename(file.with_name("elsewhere"))
    file.symlink_to(target)
    with pytest.raises(RequestError):
        open_shared(NAME, 8)
