# SPDX-License-Identifier: Apache-2.0
"""Logprobs against float64."""

from __future__ import annotations

import math

import torch

from tetrarch.executor.logprobs import LogprobQuery, Scores
from tetrarch.executor.step import TokenLogprob

VOCAB = 300
LOGITS = (torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
TOKENS = [row % VOCAB for row in range(300)]
QUERIES = [LogprobQuery(row % 4, (row % 7, 299)) for row in range(300)]


def token_logprobs(
    logits: torch.Tensor, tokens: list[int], queries: list[LogprobQuery]
) -> list[TokenLogprob | None]:
    return Scores(logits, torch.tensor(tokens), queries).wait(tokens)


def test_logprobs_equal_a_float64_log_softmax() -> None:
    exact = LOGITS.double().log_softmax(-1)
    answers = token_logprobs(LOGITS, TOKENS, QUERIES)
    assert len(answers) == 300
    for row, (query, answer) in enumerate(zip(QUERIES, answers, strict=True)):
        assert answer is not None
        assert answer.token_id == TOKENS[row]
        pairs = ((TOKENS[row], answer.logprob), *answer.top, *answer.picked)
        assert all(math.isclose(p, exact[row, i], abs_tol=1e-5) for i, p in pairs)
        assert [i for i, _ in answer.picked] == list(query.picked_ids)
        best = exact[row].topk(query.num_top).values.tolist()
        assert [exact[row, i].item() for i, _ in answer.top] == best


def test_the_best_alternative_has_the_float_of_the_chosen_token() -> None:
    """lm-eval decides `is_greedy` by comparing these floats for equality."""
    chosen = LOGITS.float().argmax(-1).tolist()
    for answer in token_logprobs(LOGITS, chosen, [LogprobQuery(1, (i,)) for i in chosen]):
        assert answer is not None
        assert answer.top == answer.picked == ((answer.token_id, answer.logprob),)


def test_neighbours_do_not_change_a_bit() -> None:
    """300 rows cross the chunks of 128; each must equal itself alone."""
    together = token_logprobs(LOGITS, TOKENS, QUERIES)
    alone = [
        token_logprobs(LOGITS[i : i + 1], TOKENS[i : i + 1], QUERIES[i : i + 1])[0]
        for i in range(300)
    ]
    assert together == alone


def test_more_alternatives_than_the_vocabulary_are_all_of_it() -> None:
    (answer,) = token_logprobs(torch.randn(1, 4), [0], [LogprobQuery(20, ())])
    assert answer is not None
    assert sorted(i for i, _ in answer.top) == [0, 1, 2, 3]


def test_a_row_that_is_not_finite_has_no_logprobs() -> None:
    logits = torch.randn(4, 8)
    logits[1, 3], logits[2, 3] = torch.nan, torch.inf
    answers = token_logprobs(logits, [0] * 4, [LogprobQuery(2, (1,))] * 4)
    assert [answer is None for answer in answers] == [False, True, True, False]


def test_a_masked_token_is_impossible_not_an_error() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = -torch.inf
    (answer,) = token_logprobs(logits, [2], [LogprobQuery(4, ())])
    assert answer is not None
    assert answer.logprob == -math.inf
    assert answer.top[-1] == (2, -math.inf)
