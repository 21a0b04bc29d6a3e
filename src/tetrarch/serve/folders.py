# SPDX-License-Identifier: Apache-2.0
"""Which folders an update of the weights may read: local ones under `--weights-root`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tetrarch.core.errors import RequestError
from tetrarch.serve.errors import Failure, HttpError

__all__ = ["check_folder"]

_KINDS = ("*.safetensors", "*.json")  # what an update reads


def check_folder(path: str, *, root: str, served: str) -> None:
    """Refuse a folder that an update may not or cannot read. Nothing but names is looked at.

    Args:
        path: As the client sent it.
        root: Where it must lie, and all its files with it, symlinks resolved.
        served: Path of the checkpoint that is served now; the example of a refusal.

    Raises:
        HttpError: 403, it lies elsewhere. That is told before whether it exists.
        RequestError: It is no folder, or holds no safetensors.
    """
    try:
        folder = Path(path).resolve()
        _check_below(folder, root)
        if not folder.is_dir():
            raise _not_a_folder(path, served)
        files = list(_files(folder))
        for file in files:
            _check_below(file.resolve(), root)
    except (OSError, ValueError, RuntimeError) as error:  # too long, holds a zero byte, loops
        raise RequestError(
            f"model_path {path[:200]!r} cannot be looked up",
            why=str(error),
            fix=f"send the path of a folder, such as {served}",
            param="model_path",
        ) from error
    if not any(file.suffix == ".safetensors" for file in files):
        raise RequestError(
            f"model_path {path!r} holds no safetensors",
            why="weights are read from *.safetensors only; pickles can run code",
            fix="save the checkpoint as safetensors, with its config.json",
            param="model_path",
        )


def _files(folder: Path) -> Iterator[Path]:
    for kind in _KINDS:
        yield from folder.glob(kind)


def _check_below(path: Path, root: str) -> None:
    if not path.is_relative_to(root):
        raise HttpError(
            Failure(
                status=403,
                message="model_path leads out of the folder that updates may read; send a folder "
                f"under {root}, or start the server with another --weights-root",
                param="model_path",
            )
        )


def _not_a_folder(path: str, served: str) -> RequestError:
    return RequestError(
        f"model_path {path!r} is not a folder of this machine",
        why="an update reads local folders; nothing is downloaded while serving",
        fix=f"download it first (hf download), then send the folder, such as {served}",
        param="model_path",
    )
