# SPDX-License-Identifier: Apache-2.0
"""What a chat samples with when its client says nothing: the model's own generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

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


def read_chat_defaults(checkpoint: str) -> dict[str, Any]:
    """Read generation_config.json of a checkpoint folder, as sampling parameters.

    `do_sample: false` means greedy. A `top_k` of 0 means all, which is our default.

    Raises:
        CheckpointError: The file is there and cannot be understood.
    """
    path = Path(checkpoint) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read {path}",
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
