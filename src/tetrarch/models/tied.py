# SPDX-License-Identifier: Apache-2.0
"""Copies of a weight to which a configuration ties them: they are left out, if they are copies."""

from __future__ import annotations

import torch

from tetrarch.core.errors import CheckpointError
from tetrarch.memory.checksum import digest
from tetrarch.models.build import Model
from tetrarch.models.destinations import DenseDestination
from tetrarch.models.placement import Placements
from tetrarch.models.report import Unused
from tetrarch.models.sources import Source

__all__ = ["check_tied"]


def check_tied(model: Model, source: Source, placements: Placements) -> None:
    """Read what is tied, and what it is tied to; nothing where a checkpoint stores it once.

    A wrong `tie_word_embeddings: true` would let the embedding stand for a head of its own. Copies
    that are quantized, or of what is quantized, are not compared.

    Args:
        model: Knows what is tied to what.
        source: Of the placements.
        placements: Of a whole checkpoint.

    Raises:
        CheckpointError: A copy differs from its original.
    """
    originals = {
        one.to.name: one.weight
        for one in placements.weights
        if isinstance(one.to, DenseDestination) and len(one.weight.parts) == 1
    }
    for copy in placements.unused.get(Unused.TIED, ()):
        to = model.names.tied_to(copy)
        if to not in originals or source.headers[copy].dtype.itemsize == 1:
            continue
        original, dtype = next(iter(originals[to].parts.values())), model.weights[to].dtype
        if _digest(source, copy, dtype) != _digest(source, original, dtype):
            raise CheckpointError(
                f"{copy} of {source.name} is not what config.json ties it to",
                why=f"it differs from {original}, and would be left out for a copy of it",
                fix='"tie_word_embeddings": false in config.json, or take the tensor out',
            )


def _digest(source: Source, name: str, dtype: torch.dtype) -> str:
    [(_, value)] = source.read([name])
    return digest(value.to(dtype))
