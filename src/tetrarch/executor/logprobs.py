# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, as OpenAI's API and evaluation harnesses mean them.

They are the FP32 log-softmax of the model's own logits: before temperature, penalties, bias and
filters. So they describe the model, not the request, and a prompt token scores the same whether
it was sampled or given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tetrarch.executor.ranking import best_ids
from tetrarch.executor.step import TokenLogprob
from tetrarch.executor.transfer import Download, upload

__all__ = ["LogprobQuery", "Scores"]

_ROWS = 128  # at a time: 128 rows of a vocabulary of 152k take 78 MB in FP32, twice that ranked


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """What to report about one row of logits, beside the token's own logprob."""

    num_top: int
    picked_ids: tuple[int, ...]


class Scores:
    """The answers to one query a row, on their way to the host.

    All numbers of a row come from one tensor, so the best alternative's logprob and the token's
    own are the same float when they are the same token.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, queries: Sequence[LogprobQuery]) -> None:
        """Score on the device, and start the copies to the host.

        Args:
            logits: (N, V) any float type, as the model gave them.
            token_ids: (N,) int64, whose logprobs to report.
            queries: One per row, at least one.
        """
        self._queries = queries
        most = min(max(query.num_top for query in queries), logits.shape[-1])
        parts = [
            _score(
                logits[first : first + _ROWS].float().log_softmax(dim=-1),
                token_ids[first : first + _ROWS],
                queries[first : first + _ROWS],
                most,
            )
            for first in range(0, len(queries), _ROWS)
        ]
        self._download = Download([torch.cat(column) for column in zip(*parts, strict=True)])

    def wait(self, token_ids: Sequence[int]) -> list[TokenLogprob | None]:
        """Return one answer per row, about these tokens; `None` where logits hold NaN or +Inf."""
        own, top_ids, top, picked = (tensor.tolist() for tensor in self._download.wait())
        rest = iter(picked)
        answers: list[TokenLogprob | None] = []
        for row, (token_id, query) in enumerate(zip(token_ids, self._queries, strict=True)):
            pairs = tuple((picked_id, next(rest)) for picked_id in query.picked_ids)
            if own[row] != own[row]:  # NaN: one bad logit makes the whole row's normaliser NaN
                answers.append(None)
                continue
            best = zip(top_ids[row][: query.num_top], top[row], strict=False)
            answers.append(TokenLogprob(token_id, own[row], tuple(best), pairs))
        return answers


def _score(
    logprobs: Tensor, token_ids: Tensor, queries: Sequence[LogprobQuery], most: int
) -> tuple[Tensor, ...]:
    """Return the tokens' own (N,), the best ids and theirs (N, most), and those picked (P,)."""
    top_ids = best_ids(logprobs, most) if most else token_ids.new_empty(len(queries), 0)
    picked = [(row, i) for row, query in enumerate(queries) for i in query.picked_ids]
    (at,) = upload(logprobs.device, np.array(picked, np.int64).reshape(-1, 2).T)
    own = logprobs.gather(1, token_ids[:, None])[:, 0]
    return own, top_ids, logprobs.gather(1, top_ids), logprobs[at[0], at[1]]
