# SPDX-License-Identifier: Apache-2.0
"""A folder is itself; a hub name is downloaded, or the reason why not is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tetrarch.core.errors import CheckpointError
from tetrarch.models import fetch as module
from tetrarch.models.fetch import fetch


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/no/such/folder", "./gone", "~/gone", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_asked_of_the_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        fetch(model)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        fetch(str(tmp_path / "model.gguf"))


def test_a_hub_name_is_downloaded_without_pickles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(module, "snapshot_download", download)
    assert fetch("organisation/model", revision="main") == tmp_path
    assert asked["name"] == "organisation/model"
    assert asked["revision"] == "main"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern or "gguf" in pattern for pattern in asked["allow_patterns"])


def test_without_a_network_and_a_copy_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's own client, offline, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        fetch("organisation/model-that-nobody-has")
    assert "organisation/model-that-nobody-has" in caught.value.what
    assert "cannot be reached" in caught.value.why
    assert "pass its folder" in caught.value.fix


def test_a_name_that_cannot_be_one_is_explained() -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch("no spaces allowed")
    assert "organisation/model" in caught.value.fix


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RepositoryNotFoundError("x", response=RESPONSE), "no such public model"),
        (GatedRepoError("x", response=RESPONSE), "access to it must be granted"),
        (RevisionNotFoundError("x", response=RESPONSE), "no such revision"),
        (LocalEntryNotFoundError("x"), "cannot be reached"),
        (HfHubHTTPError("too many requests", response=RESPONSE), "too many requests"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_of_the_hub_is_a_checkpoint_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def download(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(module, "snapshot_download", download)
    with pytest.raises(CheckpointError) as caught:
        fetch("organisation/model")
    assert words in caught.value.why
    assert caught.value.__cause__ is error
