# SPDX-License-Identifier: Apache-2.0
"""What a request changes about the logits before anything is drawn.

In this order: repetition penalty on the model's own logits, then frequency and presence
penalties, then bias, then bans. Only the touched entries are read and written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tetrarch.executor.step import SampleSpec

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
        at = _entries(edited, ((row, [i for i, _ in spec.logit_bias]) for row, spec in biased))
        amounts = [bias for _, spec in biased for _, bias in spec.logit_bias]
        edited[at] += torch.tensor(amounts, dtype=torch.float32, device=edited.device)
    if banned:
        edited[_entries(edited, ((row, spec.banned_ids) for row, spec in banned))] = -torch.inf
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
    at = _entries(logits, seen)
    repetition, lost = torch.from_numpy(np.concatenate(factors, axis=1)).to(logits)
    values = logits[at]
    logits[at] = torch.where(values > 0, values / repetition, values * repetition) - lost


def _entries(
    logits: Tensor, rows: Iterable[tuple[int, Sequence[int] | np.ndarray]]
) -> tuple[Tensor, Tensor]:
    """Return (row, id) index tensors."""
    pairs = [(row, np.asarray(ids, np.int64)) for row, ids in rows]
    at = np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs])
    ids = np.concatenate([ids for _, ids in pairs])
    return torch.from_numpy(at).to(logits.device), torch.from_numpy(ids).to(logits.device)
