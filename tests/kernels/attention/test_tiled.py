# SPDX-License-Identifier: Apache-2.0
"""Tiled attention equals the reference, and a query's bits depend on its own keys alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tetrarch.kernels.attention import reference, tiled
from tetrarch.kernels.attention.reference import PagedBatch, ScoreRule, plan_batch, write_

PAGE, HEADS = 4, 6
Lens = list[tuple[int, int]]  # (new tokens, keys) of each sequence
MIXED: Lens = [(5, 5), (1, 9), (70, 200), (1, 64), (1, 65), (3, 131), (1, 300), (40, 40)]


@dataclass(frozen=True)
class Form:
    """Heads and widths of a layer."""

    groups: int
    key_dim: int
    value_dim: int
    latent: bool = False


FORMS = [Form(2, 16, 16), Form(6, 24, 16), Form(3, 48, 80), Form(1, 32, 8, latent=True)]
RULES = ["plain", "window", "sinks", "window and sinks"]


def rule_of(name: str) -> ScoreRule:
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(2))
    return ScoreRule(
        scale=0.3,
        window=37 if "window" in name else None,
        sinks=sinks if "sinks" in name else None,
    )


class Sequence:
    """Its queries, keys and values at every position; the same for a seed, whoever asks."""

    def __init__(self, form: Form, length: int, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)

        def rows(*shape: int) -> Tensor:
            return torch.randn(length, *shape, generator=generator).to(dtype)

        query_dim = form.key_dim + form.value_dim if form.latent else form.key_dim
        self.query = rows(HEADS, query_dim)
        self.key = rows(form.groups, form.key_dim)
        self.value = rows(form.groups, form.value_dim)


def attend(
    kernels: object, form: Form, seqs: list[Sequence], lens: Lens, rule: ScoreRule
) -> list[Tensor]:
    """Run one step over shuffled pages, everything else in the pool NaN; one result a sequence."""
    counts = [-(-kv // PAGE) for _, kv in lens]
    order = (torch.randperm(sum(counts) + 3) + 1).tolist()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    dtype = seqs[0].key.dtype
    shape = (sum(counts) + 5, PAGE, form.groups)
    keys = torch.full((*shape, form.key_dim), torch.nan, dtype=dtype)
    values = torch.full((*shape, form.value_dim), torch.nan, dtype=dtype)

    def step(q_lens: list[int]) -> PagedBatch:
        spans = [range(kv - q, kv) for q, (_, kv) in zip(q_lens, lens, strict=True)]
        flat = [
            int(table[r, p // PAGE]) * PAGE + p % PAGE for r, span in enumerate(spans) for p in span
        ]
        batch = plan_batch(
            table,
            write_at=torch.tensor(flat),
            q_lens=q_lens,
            kv_lens=[kv for _, kv in lens],
            page_size=PAGE,
        )
        write_(
            keys,
            torch.cat([s.key[kv - q : kv] for s, q, (_, kv) in _each(seqs, q_lens, lens)]),
            batch,
        )
        write_(
            values,
            torch.cat([s.value[kv - q : kv] for s, q, (_, kv) in _each(seqs, q_lens, lens)]),
            batch,
        )
        return batch

    step([kv for _, kv in lens])  # all of their history, then the step that is looked at
    q_lens = [q for q, _ in lens]
    batch = step(q_lens)
    query = torch.cat([s.query[kv - q : kv] for s, (q, kv) in zip(seqs, lens, strict=True)])
    assert kernels in (reference, tiled)
    module = tiled if kernels is tiled else reference
    if form.latent:
        halves = query.split((form.key_dim, form.value_dim), -1)
        out = module.paged_latent_attention(*halves, keys, values, batch, rule)
    else:
        out = module.paged_attention(query, keys, values, batch, rule)
    return list(out.split(q_lens))


def _each(
    seqs: list[Sequence], q_lens: list[int], lens: Lens
) -> Iterator[tuple[Sequence, int, tuple[int, int]]]:
    return zip(seqs, q_lens, lens, strict=True)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_it_computes_what_the_reference_defines(form: Form, rule: str) -> None:
    seqs = [Sequence(form, kv, i, torch.float32) for i, (_, kv) in enumerate(MIXED)]
    torch.manual_seed(0)
    want = attend(reference, form, seqs, MIXED, rule_of(rule))
    got = attend(tiled, form, seqs, MIXED, rule_of(rule))
    torch.testing.assert_close(got, want, atol=5e-6, rtol=5e-6)


def variants(kernels: object, form: Form, rule: ScoreRule, dtype: torch.dtype) -> list[Tensor]:
    """Return rows 128 .. 131 of one sequence, computed in every company that can befall them."""
    one = Sequence(form, 132, 99, dtype)
    others = [Sequence(form, kv, i, dtype) for i, (_, kv) in enumerate(MIXED)]
    found: list[Tensor] = []
    torch.manual_seed(1)
    for q_len in (4, 7, 33, 132):
        [rows] = attend(kernels, form, [one], [(q_len, 132)], rule)
        found.append(rows[-4:])
    single = [attend(kernels, form, [one], [(1, kv)], rule)[0] for kv in range(129, 133)]
    found.append(torch.cat(single))
    for num_others in (1, 3, len(others)):
        lens: Lens = [*MIXED[:num_others], (4, 132)]
        found.append(attend(kernels, form, [*others[:num_others], one], lens, rule)[-1])
    same = [*(Sequence(form, kv, kv, dtype) for kv in (140, 160, 180)), one]  # one group
    lens = [(4, 140), (4, 160), (4, 180), (4, 132)]
    found.append(attend(kernels, form, same, lens, rule)[-1])
    alike = [Sequence(form, 132, i, dtype) for i in range(32)]
    found.append(attend(kernels, form, [*alike, one], [(4, 132)] * 33, rule)[-1])
    return found


def differing(form: Form, rule: str, dtype: torch.dtype) -> list[int]:
    first, *rest = variants(tiled, form, rule_of(rule), dtype)
    assert first.isfinite().all()
    return [index for index, other in enumerate(rest) if not torch.equal(other, first)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_query_has_the_same_bits_in_any_company(form: Form, rule: str) -> None:
    assert differing(form, rule, torch.float32) == []
    assert differing(form, rule, torch.bfloat16) == []


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nor_does_it_matter_where_there_are_two_threads(form: Form) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert differing(form, "plain", torch.float32) == []
    finally:
        torch.set_num_threads(before)


def test_the_reference_fails_that_test() -> None:
    first, *rest = variants(reference, FORMS[0], rule_of("plain"), torch.float32)
    assert any(not torch.equal(other, first) for other in rest)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 33])
def test_heads_are_multiplied_by_their_own_weights(count: int) -> None:
    rows, weight = torch.randn(33, HEADS, 24), torch.randn(HEADS, 24, 16)
    whole = tiled.per_head(rows, weight)
    torch.testing.assert_close(whole, reference.per_head(rows, weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(tiled.per_head(rows[-count:], weight), whole[-count:])
