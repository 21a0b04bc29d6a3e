# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint, and fields of its JSON: what is not what it must be is refused by name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, cast

from tetrarch.core.errors import CheckpointError

__all__ = [
    "TOKENIZER_CONFIG",
    "field_error",
    "is_file",
    "is_folder",
    "names_in",
    "object_in",
    "open_file",
    "read_object",
]

TOKENIZER_CONFIG = "tokenizer_config.json"

_MOST_JSON = 1 << 28  # bytes; an index of 50,000 tensors takes 5 MB
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def is_folder(path: Path) -> bool:
    """Whether there is such a folder.

    Raises:
        CheckpointError: We may not look, or the name is no path at all.
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise _unreadable(path, error) from error


def is_file(path: Path) -> bool:
    """Whether there is such a file; a link that leads nowhere is none.

    Raises:
        CheckpointError: We may not look.
    """
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from error


def open_file(path: Path) -> FileIO:
    """Open an ordinary file to read it, unbuffered.

    A pipe would wait for a writer for ever, and a device may have no end.

    Raises:
        OSError: There is none, it is of another kind, or we may not read it.
    """
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no ordinary file")
    return file


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; `None` where there is no such file.

    Raises:
        CheckpointError: It cannot be read, is no ordinary file, not UTF-8, not JSON, or no object.
    """
    try:
        with open_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MOST_JSON:
                raise ValueError(f"it is {size} bytes long, more than any JSON of a checkpoint")
            value: object = json.loads(file.readall().decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} is not a JSON object",
            why=f"it holds {_kind(value)}",
            fix="download the file again",
        )
    return cast("dict[str, Any]", value)


def object_in(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object that a JSON object may hold; an empty one where it does not.

    Raises:
        CheckpointError: There is something else under that name.
    """
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise field_error(name, value, "an object")
    return cast("Mapping[str, Any]", value)


def names_in(holder: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of texts that a JSON object may hold; none where it does not.

    Raises:
        CheckpointError: There is something else under that name.
    """
    value = holder.get(name)
    if value is None:
        return ()
    items = cast("list[object]", value if isinstance(value, list) else [None])
    if not all(isinstance(item, str) for item in items):
        raise field_error(name, value, "a list of texts")
    return tuple(str(item) for item in items)


def field_error(name: str, value: object, expected: str) -> CheckpointError:
    """Say what a field is and what it must be."""
    shown = repr(value)
    return CheckpointError(
        f"the checkpoint's {name} is {shown if len(shown) < 60 else _kind(value)}",
        why=f"it must be {expected}",
        fix=f"correct {name}, or download the checkpoint's JSON files again",
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read",
        why=(str(error) or type(error).__name__).partition("\n")[0],
        fix="check its permissions"
        if isinstance(error, PermissionError)
        else "download it again, or correct the path",
    )


def _kind(value: object) -> str:
    for kind, words in _KINDS.items():
        if isinstance(value, kind):
            return words
    return "null"
