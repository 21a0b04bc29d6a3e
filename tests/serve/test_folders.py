# SPDX-License-Identifier: Apache-2.0
"""Which folders an update may read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tetrarch.core.errors import RequestError
from tetrarch.serve.errors import HttpError
from tetrarch.serve.folders import check_folder


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    (folder / "config.json").touch()
    return folder


def check(path: Path | str, root: Path | str) -> None:
    check_folder(str(path), root=str(root), served="/models/served")


def test_a_folder_below_the_root_is_read(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "root" / "deep" / "model")
    for root in ("/", tmp_path, tmp_path / "root", model):
        check(model, root)
        check(f"{model}/../model/.", root)
    check(os.path.relpath(model), tmp_path)


def test_what_leads_out_of_the_root_is_forbidden_whether_it_exists_or_not(tmp_path: Path) -> None:
    root, other = tmp_path / "root", checkpoint(tmp_path / "other")
    inside = checkpoint(root / "inside")
    (root / "link").symlink_to(other)
    (root / "back").symlink_to(inside)
    check(root / "back", root)
    sibling = checkpoint(tmp_path / "root-2")  # a name that only begins alike
    for path in (other, root / "link", f"{root}/../other", sibling, tmp_path / "ghost", "/etc"):
        with pytest.raises(HttpError) as refused:
            check(path, root)
        assert refused.value.failure.status == 403
        assert "--weights-root" in refused.value.failure.message
        assert refused.value.failure.param == "model_path"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_a_file_that_links_out_of_the_root_is_forbidden(tmp_path: Path, name: str) -> None:
    model = checkpoint(tmp_path / "root" / "model")
    secret = tmp_path / "secret"
    secret.touch()
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    check(model, tmp_path)
    with pytest.raises(HttpError):
        check(model, tmp_path / "root")


def test_names_of_the_hub_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for path in ("Qwen/Qwen3-30B-A3B", str(tmp_path / "ghost")):
        with pytest.raises(RequestError, match="not a folder of this machine") as refused:
            check(path, "/")
        assert "hf download" in refused.value.fix
        assert refused.value.param == "model_path"


def test_safetensors_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(RequestError, match="holds no safetensors"):
        check(tmp_path, "/")
    with pytest.raises(RequestError, match="not a folder"):
        check(tmp_path / "pytorch_model.bin", "/")


def test_paths_that_no_system_has_are_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in ("a\0b", "x" * 100_000, "/".join(["y" * 300] * 4), str(loop)):
        with pytest.raises(RequestError) as refused:
            check(path, "/")
        assert refused.value.param == "model_path"
        assert len(refused.value.what) < 1000
