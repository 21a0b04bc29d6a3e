# SPDX-License-Identifier: Apache-2.0
"""How a layer is named in `--fp4-ignored-layers` and in a checkpoint's list of exclusions."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

__all__ = ["is_pattern", "matches"]

_REGEX = "re:"


def is_pattern(pattern: str) -> bool:
    """Whether `pattern` can be understood: a regular expression must compile."""
    if not pattern.startswith(_REGEX):
        return True
    try:
        re.compile(pattern.removeprefix(_REGEX))
    except re.error:
        return False
    return True


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` names the module `path` or one that contains it.

    Three dialects, all of which appear in real checkpoints: `re:` and a regular expression that
    matches from the start of the path (compressed-tensors); a glob (ModelOpt); a plain name. Globs
    and names stand for runs of whole parts of the path, so that `layers.4` is not `layers.40` and
    `model.` may be left out (SGLang).
    """
    parts = path.split(".")
    ends = range(1, len(parts) + 1)
    if pattern.startswith(_REGEX):
        regex = re.compile(pattern.removeprefix(_REGEX))
        return any(regex.match(".".join(parts[:end])) for end in ends)
    runs = (".".join(parts[start:end]) for end in ends for start in range(end))
    return any(fnmatchcase(run, pattern) for run in runs)
