# SPDX-License-Identifier: Apache-2.0
"""From what an operator calls a model to a folder that holds it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tetrarch.config.files import is_file, is_folder
from tetrarch.core.errors import CheckpointError

__all__ = ["fetch"]

# What serving reads: weights, configs, tokenizer files, chat templates. Not PyTorch pickles, GGUF.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def fetch(model: str, *, revision: str | None = None) -> Path:
    """Return the local folder of a model, downloading it where the name is one of the hub's.

    Args:
        model: A folder, or a name on the Hugging Face hub such as `Qwen/Qwen3-30B-A3B`. A folder
            that exists wins.
        revision: Branch, tag or commit on the hub; `None`: its main branch.

    Raises:
        CheckpointError: No such folder, no such name, no permission, or no network and no
            complete copy in the hub cache.
    """
    folder = _expanded(model)
    if is_folder(folder):
        return folder
    if is_file(folder) or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointError(
            f"{model} is not a folder",
            why="a path must name a folder that holds config.json and safetensors",
            fix="correct the path, or pass a hub name such as organisation/model",
        )
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(_PATTERNS)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why, fix = _explain(error)
        raise CheckpointError(f"cannot fetch {model!r} from the hub", why=why, fix=fix) from error


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # `~somebody`, whom this machine does not know
        return Path(model)


def _explain(error: Exception) -> tuple[str, str]:
    """Return why and fix. Gated is a kind of not found, so it is asked first."""
    match error:
        case HFValidationError():
            return str(error), "pass a local folder, or a name such as organisation/model"
        case GatedRepoError():
            return (
                "access to it must be granted",
                "accept its terms on the hub, then log in with hf",
            )
        case RevisionNotFoundError():
            return "there is no such revision", "name an existing branch, tag or commit"
        case RepositoryNotFoundError():
            return "there is no such public model", "check the spelling; log in with hf if private"
        case LocalEntryNotFoundError():
            return (
                "the hub cannot be reached, and no complete copy is in the local cache",
                "connect to a network, or copy the checkpoint here and pass its folder",
            )
        case _:
            return f"{type(error).__name__}: {error}", "check network, disk space and hub status"
