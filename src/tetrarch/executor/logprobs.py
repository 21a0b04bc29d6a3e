# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, as OpenAI's API and evaluation harnesses mean them.

They are the FP32 log-softmax of the model's own logits: before temperature, penalties, bias and
filters. So they describe the model, not the request, and a prompt token scores the same whether
it was sampled or given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tetrarch.executor.ranking import best_ids
from tetrarch.executor.step import TokenLogprob

__all__ = ["LogprobQuery", "token_logprobs"]

_ROWS = 128  # at a time: 128 rows of a vocabulary of 152k take 78 MB in FP32, twice that ranked


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """What to report about one row of logits."""

    token_id: int
    num_top: int
    picked_ids: tuple[int, ...]


def token_logprobs(logits: Tensor, queries: Sequence[LogprobQuery]) -> list[TokenLogprob | None]:
    """Answer one query per row.

    All numbers of a row come from one tensor, so the best alternative's logprob and the token's
    own are the same float when they are the same token.

    Args:
        logits: (N, V) any float type, as the model gave them.
        queries: One per row.

    Returns:
        One answer per row; `None` where the logits held NaN or +Inf.
    """
    answers: list[TokenLogprob | None] = []
    for first in range(0, len(queries), _ROWS):
        rows = logits[first : first + _ROWS].float().log_softmax(dim=-1)
        answers += _answer(rows, queries[first : first + _ROWS])
    return answers


def _answer(logprobs: Tensor, queries: Sequence[LogprobQuery]) -> list[TokenLogprob | None]:
    def column(ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, device=logprobs.device)[:, None]

    tokens = logprobs.gather(1, column([query.token_id for query in queries]))[:, 0].tolist()
    tops = _tops(logprobs, [query.num_top for query in queries])
    answers: list[TokenLogprob | None] = []
    for row, (query, token, top) in enumerate(zip(queries, tokens, tops, strict=True)):
        if token != token:  # NaN: one bad logit makes the whole row's normaliser NaN
            answers.append(None)
            continue
        picked = logprobs[row, list(query.picked_ids)].tolist() if query.picked_ids else []
        pairs = tuple(zip(query.picked_ids, picked, strict=True))
        answers.append(TokenLogprob(query.token_id, token, top, pairs))
    return answers


def _tops(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    if (most := min(max(counts), logprobs.shape[-1])) < 1:
        return [()] * len(counts)
    ids = best_ids(logprobs, most)
    values = logprobs.gather(1, ids).tolist()
    return [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids.tolist(), values, counts, strict=True)
    ]
