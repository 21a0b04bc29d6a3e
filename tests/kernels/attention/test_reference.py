# SPDX-License-Identifier: Apache-2.0
"""Paged attention against a float64 loop over single queries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tetrarch.kernels.attention.reference import (
    PagedBatch,
    ScoreRule,
    paged_attention,
    paged_latent_attention,
    plan_batch,
    write_,
)

PAGE, HEADS, GROUPS, DIM = 4, 4, 2, 16
DECODE = [(1, 9), (1, 1), (1, 30), (1, 8)]
MIXED = [(5, 5), (1, 9), (7, 20), (1, 4), (1, 17), (3, 8), (1, 16)]


@dataclass
class Case:
    """Sequences with their whole history, and the pools after the last step's write."""

    query: Tensor  # (T, H, D)
    history: list[tuple[Tensor, Tensor]]  # (kv_len, G, D) each
    keys: Tensor
    values: Tensor
    batch: PagedBatch


def make_case(
    lens: list[tuple[int, int]], *, dims: tuple[int, int, int] = (DIM, DIM, GROUPS)
) -> Case:
    """Scatter random sequences over shuffled pages of a pool that is NaN everywhere else."""
    key_dim, value_dim, groups = dims
    torch.manual_seed(0)
    counts = [-(-kv // PAGE) for _, kv in lens]
    order = (torch.randperm(sum(counts) + 3) + 1).tolist()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    shape = (sum(counts) + 5, PAGE, groups)
    keys = torch.full((*shape, key_dim), float("nan"))
    values = torch.full((*shape, value_dim), float("nan"))
    history = [
        (torch.randn(kv, groups, key_dim), torch.randn(kv, groups, value_dim)) for _, kv in lens
    ]

    def write(spans: list[tuple[int, int]]) -> PagedBatch | None:
        used = [row for row, (lo, hi) in enumerate(spans) if hi > lo]
        if not used:
            return None
        flat = [int(table[r, p // PAGE]) * PAGE + p % PAGE for r in used for p in range(*spans[r])]
        batch = plan_batch(
            table[used],
            write_at=torch.tensor(flat),
            q_lens=[spans[r][1] - spans[r][0] for r in used],
            kv_lens=[spans[r][1] for r in used],
            page_size=PAGE,
        )
        for which, pool in enumerate((keys, values)):
            write_(pool, torch.cat([history[r][which][slice(*spans[r])] for r in used]), batch)
        return batch

    write([(0, kv - q) for q, kv in lens])  # an earlier step
    batch = write([(kv - q, kv) for q, kv in lens])
    assert batch is not None
    query = torch.randn(sum(q for q, _ in lens), HEADS, key_dim)
    return Case(query, history, keys, values, batch)


def oracle(case: Case, lens: list[tuple[int, int]], rule: ScoreRule) -> Tensor:
    """One query at a time, in float64."""
    rows, at = [], 0
    for (q_len, kv_len), (keys, values) in zip(lens, case.history, strict=True):
        for i in range(q_len):
            end = kv_len - q_len + i + 1
            begin = 0 if rule.window is None else max(0, end - rule.window)
            for head in range(HEADS):
                group = head // (HEADS // keys.shape[1])
                scores = (
                    keys[begin:end, group].double() @ case.query[at, head].double() * rule.scale
                )
                if rule.sinks is not None:
                    scores = torch.cat((scores, rule.sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: end - begin]
                rows.append(weights @ values[begin:end, group].double())
            at += 1
    return torch.stack(rows).view(at, HEADS, -1)


@pytest.mark.parametrize("lens", [DECODE, [(1, 13)], [(6, 6)], MIXED, [(2, 5), (2, 7)]])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_row_equals_a_float64_loop(
    lens: list[tuple[int, int]], window: int | None, sinks: bool
) -> None:
    case = make_case(lens)
    rule = ScoreRule(scale=0.3, window=window, sinks=torch.randn(HEADS) if sinks else None)
    got = paged_attention(case.query, case.keys, case.values, case.batch, rule)
    torch.testing.assert_close(got.double(), oracle(case, lens, rule), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("lens", [DECODE, MIXED])
def test_latent_attention_equals_a_float64_loop(lens: list[tuple[int, int]]) -> None:
    rank, rotary = 24, 8
    case = make_case(lens, dims=(rank, rotary, 1))
    q_rotary = torch.randn(len(case.query), HEADS, rotary)
    rule = ScoreRule(scale=0.2)
    got = paged_latent_attention(case.query, q_rotary, case.keys, case.values, case.batch, rule)
    joined = Case(
        torch.cat((case.query, q_rotary), -1),
        [(torch.cat(pair, -1), pair[0]) for pair in case.history],
        case.keys,
        case.values,
        case.batch,
    )
    torch.testing.assert_close(got.double(), oracle(joined, lens, rule), atol=2e-6, rtol=2e-6)


def test_a_page_shared_by_mistake_changes_the_result() -> None:
    case = make_case(DECODE)
    rule = ScoreRule(scale=0.3)
    wrong = case.keys.clone()
    group = case.batch.groups[0]
    wrong[group.pages[0]] = case.keys[group.pages[1]]
    right = paged_attention(case.query, case.keys, case.values, case.batch, rule)
    stale = paged_attention(case.query, wrong, case.values, case.batch, rule)
    assert (right - stale).abs().max() > 1e-2


def test_bf16_stays_near_the_float64_loop() -> None:
    case = make_case(MIXED)
    rule = ScoreRule(scale=0.25, window=9)
    half = [tensor.bfloat16() for tensor in (case.query, case.keys, case.values)]
    got = paged_attention(half[0], half[1], half[2], case.batch, rule)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), oracle(case, MIXED, rule), atol=3e-2, rtol=3e-2)
