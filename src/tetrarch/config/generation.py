# SPDX-License-Identifier: Apache-2.0
"""What a chat samples with when its client says nothing: the model's own generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tetrarch.config.files import read_object
from tetrarch.core.errors import CheckpointError

__all__ = ["read_chat_defaults"]


class _GenerationConfig(msgspec.Struct):
    """The fields of generation_config.json that say how to sample."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_chat_defaults(folder: Path) -> dict[str, Any]:
    """Read generation_config.json of a checkpoint, as sampling parameters.

    `do_sample: false` means greedy. A `top_k` of 0 means all, which is our default.

    Raises:
        CheckpointError: The file is there and cannot be understood.
    """
    path = folder / "generation_config.json"
    try:
        config = msgspec.convert(read_object(path) or {}, _GenerationConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"cannot sample as {path} says",
            why=str(error),
            fix="repair the file, or delete it to sample with temperature 1",
        ) from error
    found = {
        "temperature": 0.0 if config.do_sample is False else config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or None,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
    }
    return {name: value for name, value in found.items() if value is not None}
