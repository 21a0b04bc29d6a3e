# SPDX-License-Identifier: Apache-2.0
"""Whether new weights belong to the model that is running.

Weights are replaced, the module tree is not: a checkpoint whose configuration computes something
else would load without complaint and answer wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from tetrarch.core.errors import CheckpointError
from tetrarch.models.build import Model
from tetrarch.models.names import MTP_FIELDS
from tetrarch.models.skeleton import read_config

__all__ = ["check_same_model"]

# They describe files, producers, training or generation defaults; no forward depends on them.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "router_aux_loss_coef",
        "output_router_logits",
        "attention_dropout",
    }
)
# What files bring of a draft is for its tensors to tell, where one is served.
_OF_DRAFTS = frozenset(MTP_FIELDS)
_SHOWN = 10


def check_same_model(model: Model, new: str) -> None:
    """Compare a checkpoint's configuration with that of the model which is running.

    Args:
        model: The running one; the folder it came from may be gone.
        new: Folder of the new weights.

    Raises:
        CheckpointError: They differ in what a forward depends on; keys and both values are named.
    """
    ours, theirs = model.hf.config.to_dict(), read_config(new).to_dict()
    if model.draft is not None:
        ours, theirs = ({k: v for k, v in c.items() if k not in _OF_DRAFTS} for c in (ours, theirs))
    differing = list(_differences(ours, theirs, prefix=""))
    if differing:
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise CheckpointError(
            f"{new} is another model than the one that is served",
            why="config.json differs in " + "; ".join(differing[:_SHOWN]) + more,
            fix="restart the server with it; an update replaces weights, not the architecture",
        )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted({*ours, *theirs} - _IRRELEVANT):
        old, new = ours.get(key), theirs.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            pair = cast("tuple[dict[str, Any], dict[str, Any]]", (old, new))
            yield from _differences(*pair, prefix=f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} (served {old!r}, new {new!r})"
