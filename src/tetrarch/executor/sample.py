# SPDX-License-Identifier: Apache-2.0
"""Logits → tokens, one draw per row.

The order is fixed: penalties, bias and bans (penalties.py), temperature, top-k, top-p over what
top-k left, min-p relative to the best token. It is the order of Hugging Face's generation;
min-p comes last, so its threshold is a fraction of the probability after temperature.

A draw depends on the row's own distribution, `seed` and `position`, on nothing else: not on the
other rows of the batch, not on the row's place among them. Each draw uses one uniform number, a
hash of (seed, position), and inverts the cumulative distribution there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tetrarch.executor.penalties import edit_logits
from tetrarch.executor.step import SampleSpec
from tetrarch.executor.transfer import upload

__all__ = ["sample", "uniforms"]

_GREEDY_BELOW = 1e-6  # SGLang's bound: a smaller temperature means 0
_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Choose a token for each row, on the device: nobody waits for it here.

    Greedy rows (temperature below 1e-6, or top-k 1) take the largest logit, the lowest id among
    equals. All arithmetic is FP32.

    Args:
        logits: (N, V) any float type, as the model gave them; not modified.
        specs: One per row.

    Returns:
        (N,) int64, one id per row; -1 where the logits held NaN or +Inf, or no token may be drawn.
        Such a row does not disturb the others. -Inf is a token that is never drawn.
    """
    raw = logits.float()
    edited = edit_logits(raw, specs)
    best, ids = edited.max(dim=-1)
    usable = best.isfinite()
    if edited is not raw:  # a ban must not hide a broken forward
        usable &= raw.amax(dim=-1).isfinite()
    drawn = [row for row, spec in enumerate(specs) if not _is_greedy(spec)]
    if drawn:
        _draw_(ids, edited, best, [(row, specs[row]) for row in drawn])
    return ids.masked_fill(~usable, -1)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """Return the numbers in [0, 1) that decide draws, multiples of 2^-24: (N,).

    The seed is hashed before the position is added, so that neighbouring seeds do not share a
    stream.

    Source: splitmix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    streams = _mix(np.array([seed & _MASK for seed in seeds], np.uint64))
    steps = np.array(positions, np.uint64) + np.uint64(1)
    return (_mix(streams + steps * _GOLDEN) >> np.uint64(40)).astype(np.float32) * np.float32(
        2.0**-24
    )


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash modulo 2^64, as NumPy's arrays multiply."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _is_greedy(spec: SampleSpec) -> bool:
    return spec.temperature < _GREEDY_BELOW or spec.top_k == 1


def _is_filtered(spec: SampleSpec) -> bool:
    return spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0


def _draw_(
    ids: Tensor, logits: Tensor, best: Tensor, chosen: Sequence[tuple[int, SampleSpec]]
) -> None:
    """Draw some rows of `ids` (N,) from softmax(logits / temperature) after each one's filters.

    Args:
        ids: Written where a row is chosen.
        logits: (N, V) fp32.
        best: (N,), the largest of each row.
        chosen: Rows, ascending, and how to draw them.
    """
    specs = [spec for _, spec in chosen]
    filtered = [index for index, spec in enumerate(specs) if _is_filtered(spec)]
    limits = [_limits(specs[index], logits.shape[-1]) for index in filtered]
    rows, temperatures, points, some, bounds = upload(
        logits.device,
        np.array([row for row, _ in chosen], np.int64),
        np.array([[spec.temperature] for spec in specs], np.float32),
        uniforms([spec.seed for spec in specs], [spec.position for spec in specs])[:, None],
        np.array(filtered, np.int64),
        np.array(limits, np.float32).reshape(len(filtered), 3),
    )
    shifted = logits[rows] - best[rows, None]  # at most 0: no temperature can overflow it
    probs = (shifted / temperatures).softmax(dim=-1)
    if filtered:
        kept = probs[some]
        probs[some] = kept.where(kept >= _least_kept(kept, bounds), 0.0)
    ids[rows] = _invert(probs, points)


def _limits(spec: SampleSpec, vocab_size: int) -> tuple[float, float, float]:
    top_k = min(spec.top_k, vocab_size) if spec.top_k > 0 else vocab_size
    return top_k, spec.top_p, spec.min_p


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds `point` of the total.

    An index of weight 0 is never that first one. `point * total` rounds to below the total,
    because points end at 1 - 2^-24: the index is in range. Only NaN needs the clamp.
    """
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return index[:, 0].clamp(max=weights.shape[-1] - 1)


def _least_kept(probs: Tensor, bounds: Tensor) -> Tensor:
    """Return the smallest probability that passes (N, 3) top-k, top-p, min-p: (N, V) -> (N, 1).

    Top-p keeps the shortest run of best tokens that holds `top_p` of what top-k left, and at
    least one. Tokens exactly as likely as the last one kept are kept too, so that a vocabulary's
    order decides nothing.
    """
    vocab_size = probs.shape[-1]
    top_k, top_p, min_p = bounds.split(1, dim=1)
    best = _descending(probs)
    mass = best.cumsum(dim=-1)
    left = mass.gather(1, top_k.long() - 1)  # what top-k leaves; 1 up to rounding without it
    run = (mass - best < top_p * left) | (top_p >= 1.0)
    run &= torch.arange(vocab_size, device=probs.device) < top_k
    num_kept = run.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.maximum(best.gather(1, num_kept - 1), min_p * best[:, :1])


def _descending(probs: Tensor) -> Tensor:
    """Sort each row, largest first; on a CPU with numpy, 20 times faster for bare values."""
    if probs.is_cpu:
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    return probs.sort(dim=-1, descending=True).values
