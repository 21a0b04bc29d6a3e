# SPDX-License-Identifier: Apache-2.0
"""What a request changes about the logits before anything is drawn.

In this order: repetition penalty on the model's own logits, then frequency and presence
penalties, then bias, then bans. Only the touched entries are read and written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tetrarch.executor.step import SampleSpec
from tetrarch.executor.transfer import upload

__all__ = ["edit_logits"]

_LEAST_FACTOR = 1e-30  # dividing by less leaves FP32, and would look like a broken model


def edit_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Apply penalties, bias and bans.

    A token seen in the prompt or the output, with logit x and penalty p > 1, becomes x / p if
    x > 0 and x · p otherwise (Keskar et al., CTRL, 2019). A token that occurs c > 0 times in the
    output then loses c · frequency + presence (OpenAI's definition).

    Args:
        logits: (N, V) fp32; not modified.
        specs: One per row.

    Returns:
        (N, V) fp32; `logits` itself where no row asks for anything.
    """
    penalised = [(row, spec) for row, spec in enumerate(specs) if _penalises(spec)]
    biased = [(row, spec) for row, spec in enumerate(specs) if spec.logit_bias]
    banned = [(row, spec) for row, spec in enumerate(specs) if spec.banned_ids]
    if not (penalised or biased or banned):
        return logits
    edited = logits.clone()
    if penalised:
        _penalise_(edited, penalised)
    if biased:
        amounts = [bias for _, spec in biased for _, bias in spec.logit_bias]
        at = [(row, [i for i, _ in spec.logit_bias]) for row, spec in biased]
        rows, ids, amounts = _entries(edited, at, np.array(amounts, np.float32))
        edited[rows, ids] += amounts
    if banned:
        at = [(row, spec.banned_ids) for row, spec in banned]
        edited[_entries(edited, at)] = -torch.inf
    return edited


def _penalises(spec: SampleSpec) -> bool:
    return (
        spec.repetition_penalty != 1.0
        or spec.frequency_penalty != 0.0
        or spec.presence_penalty != 0.0
    )


def _penalise_(logits: Tensor, rows: Sequence[tuple[int, SampleSpec]]) -> None:
    seen: list[tuple[int, np.ndarray]] = []
    factors: list[np.ndarray] = []  # (2, n) a row: what to divide or multiply by, what to subtract
    for row, spec in rows:
        output = np.array(spec.output_ids, np.int64)
        prompt = np.array(spec.prompt_ids, np.int64)
        ids, slots = np.unique(np.concatenate((output, prompt)), return_inverse=True)
        counts = np.bincount(slots[: len(output)], minlength=len(ids))
        lost = counts * spec.frequency_penalty + (counts > 0) * spec.presence_penalty
        seen.append((row, ids))
        factors.append(
            np.stack((np.full(len(ids), max(spec.repetition_penalty, _LEAST_FACTOR)), lost))
        )
    changes = np.concatenate(factors, axis=1).astype(np.float32)
    at_rows, ids, changes = _entries(logits, seen, changes)
    repetition, lost = changes
    values = logits[at_rows, ids]
    edited = torch.where(values > 0, values / repetition, values * repetition) - lost
    logits[at_rows, ids] = edited


def _entries(
    logits: Tensor,
    rows: Sequence[tuple[int, Sequence[int] | NDArray[np.int64]]],
    *further: NDArray[np.float32],
) -> tuple[Tensor, ...]:
    """Return the index tensors (row, id) of entries, and what else goes to the device with them."""
    at = np.repeat(np.array([row for row, _ in rows], np.int64), [len(ids) for _, ids in rows])
    ids = np.concatenate([np.asarray(ids, np.int64) for _, ids in rows])
    return upload(logits.device, at, ids, *further)
