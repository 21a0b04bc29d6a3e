# SPDX-License-Identifier: Apache-2.0
"""A folder is itself; a hub name is downloaded; everything else is explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from tetrarch.core.errors import CheckpointError
from tetrarch.models import fetch as module
from tetrarch.models.fetch import fetch


def test_a_folder_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert fetch("org/model") == Path("org/model")


def test_a_hub_name_is_downloaded_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(module, "snapshot_download", download)
    assert fetch("Qwen/Qwen3-30B-A3B", revision="main") == tmp_path
    [(name, revision, patterns)] = asked
    assert (name, revision) == ("Qwen/Qwen3-30B-A3B", "main")
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or "pt" in pattern.rpartition(".")[2] for pattern in patterns)


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c", "~/missing"])
def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match="is not a folder"):
        fetch(name)


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (HFValidationError("bad name"), "bad name"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_a_failed_download_says_why(
    raised: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise raised

    monkeypatch.setattr(module, "snapshot_download", download)
    with pytest.raises(CheckpointError) as caught:
        fetch("org/model")
    assert words in caught.value.why
    assert caught.value.__cause__ is raised
