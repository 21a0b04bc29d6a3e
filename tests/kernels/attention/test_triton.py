# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton against the reference in float64.

In the interpreter sequences are short and spans are 64 keys; on a GPU both are real.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import repair
from tetrarch.core.errors import CapacityExceeded, ShapeError
from tetrarch.kernels.attention import reference
from tetrarch.kernels.attention.reference import ScoreRule

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    repair()
paged = pytest.importorskip("tetrarch.kernels.attention.triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
# What rounding the weights and the result costs; FP32 sums in another order.
ERROR = {BF16: 2e-2, FP16: 2.5e-3, FP32: 4e-6}
DECODE = [(1, 9), (1, 1), (1, 200), (1, 64), (1, 65)]
MIXED = [(33, 80), (1, 140), (4, 70), (5, 5), (1, 1)]


@dataclass(frozen=True)
class Form:
    """What an attention layer looks like."""

    heads: int = 4
    groups: int = 2
    dim: int = 16
    value_dim: int = 16
    latent: bool = False
    page: int = 16
    dtype: torch.dtype = FP32

    @property
    def out_dim(self) -> int:
        return self.dim if self.latent else self.value_dim


@dataclass
class Case:
    """Random sequences in shuffled pages of pools that are NaN wherever nobody wrote."""

    form: Form
    lens: list[tuple[int, int]]
    queries: tuple[Tensor, Tensor]
    pools: tuple[Tensor, Tensor]
    step: dict[str, Any]
    new: tuple[Tensor, Tensor]

    def plan(self, limits: Any) -> Any:
        """Plan with scratch that is full of NaN."""
        device = self.pools[0].device
        specs = paged.scratch_specs(
            limits, num_heads=self.form.heads, out_dim=self.form.out_dim, device=device
        )
        scratch = {
            name: spec.empty().fill_(NAN if spec.dtype == FP32 else -9)
            for name, spec in specs.items()
        }
        return paged.plan_batch(**self.step, limits=limits, scratch=scratch)

    def attend(self, rule: ScoreRule, limits: Any) -> Tensor:
        """Write the step's rows to copies of the pools and attend."""
        batch, pools = self.plan(limits), [pool.clone() for pool in self.pools]
        paged.write_(*pools, *self.new, batch)
        if self.form.latent:
            return paged.paged_latent_attention(*self.queries, *pools, batch, rule)
        return paged.paged_attention(self.queries[0], *pools, batch, rule)

    def expect(self, rule: ScoreRule) -> Tensor:
        """Let the reference do the same in float64, with zeros for NaN."""
        step = self.step
        batch = reference.plan_batch(
            step["page_table"],
            write_at=step["write_at"],
            q_lens=step["q_lens"],
            kv_lens=step["kv_lens_host"],
            page_size=step["page_size"],
        )
        pools = [pool.double().nan_to_num(0) for pool in self.pools]
        for pool, rows in zip(pools, self.new, strict=True):
            reference.write_(pool, rows.double(), batch)
        queries = [query.double() for query in self.queries]
        if self.form.latent:
            return reference.paged_latent_attention(*queries, *pools, batch, rule)
        return reference.paged_attention(queries[0], *pools, batch, rule)

    def check(self, rule: ScoreRule, limits: Any) -> None:
        got, want = self.attend(rule, limits), self.expect(rule)
        assert got.dtype == self.form.dtype
        error = ERROR[self.form.dtype]
        torch.testing.assert_close(got.double(), want, rtol=error, atol=error)


def make_case(
    lens: list[tuple[int, int]], form: Form, device: torch.device, *, window: int | None = None
) -> Case:
    """Keys before every row's window are NaN too, as if their pages had been freed."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(form.dtype)

    counts = [-(-kv // form.page) for _, kv in lens]
    order = (torch.randperm(sum(counts) + 3, generator=draw) + 1).int()
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    for row, pages in enumerate(order[: sum(counts)].split(counts)):
        table[row, : len(pages)] = pages
    dims = (form.dim, form.value_dim)
    pools = [torch.full((len(order) + 2, form.page, form.groups, dim), NAN) for dim in dims]
    pools = [pool.to(form.dtype) for pool in pools]
    at: list[Tensor] = []
    for row, (q_len, kv_len) in enumerate(lens):
        place = torch.arange(kv_len)
        slots = table[row, place // form.page].long() * form.page + place % form.page
        known = slice(0 if window is None else max(0, kv_len - q_len + 1 - window), kv_len - q_len)
        for pool, dim in zip(pools, dims, strict=True):
            rows = normal(kv_len, form.groups, dim)[known]
            pool.flatten(0, 1)[slots[known]] = rows
        at.append(slots[kv_len - q_len :])
    tokens = sum(q_len for q_len, _ in lens)
    cu_seqlens = torch.tensor([0, *(q_len for q_len, _ in lens)]).cumsum(0).int()
    # The model's tensors are (heads, tokens, dim), seen as (tokens, heads, dim).
    new = [normal(form.groups, tokens, dim).to(device).transpose(0, 1) for dim in dims]
    queries = [normal(form.heads, tokens, dim).to(device).transpose(0, 1) for dim in dims]
    step = {
        "page_table": table.to(device),
        "write_at": torch.cat(at).to(device),
        "cu_seqlens_q": cu_seqlens.to(device),
        "kv_lens": torch.tensor([kv for _, kv in lens], dtype=torch.int32, device=device),
        "page_size": form.page,
        "q_lens": tuple(q_len for q_len, _ in lens),
        "kv_lens_host": tuple(kv_len for _, kv_len in lens),
    }
    moved = tuple(pool.to(device) for pool in pools)
    return Case(form, lens, (queries[0], queries[1]), moved, step, (new[0], new[1]))


@pytest.fixture
def limits(device: torch.device) -> Any:
    """Short spans and few programs in the interpreter, so that programs take several units."""
    if device.type == "cuda":
        return paged.limits_for(device, num_seqs=300, num_units=4096, short_q_len=4)
    return paged.SplitLimits(num_seqs=8, num_units=40, short_q_len=4, span=64, num_programs=3)


def longer(lens: list[tuple[int, int]], device: torch.device) -> list[tuple[int, int]]:
    """Return histories that are worth a GPU's while."""
    if device.type != "cuda":
        return lens
    return [(q_len, q_len + 37 * (kv_len - q_len)) for q_len, kv_len in lens]


@pytest.mark.parametrize("lens", [DECODE, MIXED, [(40, 40)]], ids=["decode", "mixed", "prompt"])
@pytest.mark.parametrize(
    ("window", "sinks", "exact"),
    [
        pytest.param(None, False, False, marks=pytest.mark.slow),
        (None, True, True),
        (5, True, False),
        pytest.param(70, False, True, marks=pytest.mark.slow),
    ],
)
def test_every_row_equals_the_reference(
    lens: list[tuple[int, int]],
    window: int | None,
    sinks: bool,
    exact: bool,
    device: torch.device,
    limits: Any,
) -> None:
    case = make_case(longer(lens, device), Form(), device, window=window)
    logits = torch.linspace(-1, 3, 4, device=device) if sinks else None
    rule = ScoreRule(scale=0.3, window=window, sinks=logits)
    case.check(rule, replace(limits, exact_prompts=exact))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dim", "heads", "groups", "page"),
    [(64, 8, 1, 64), (80, 3, 3, 16), (96, 10, 2, 128), (128, 8, 1, 16), (192, 4, 4, 32)],
)
def test_head_sizes_and_pages(
    dim: int,
    heads: int,
    groups: int,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Any,
) -> None:
    form = Form(heads=heads, groups=groups, dim=dim, value_dim=dim, page=page, dtype=dtype)
    case = make_case(longer([(1, 70), (20, 25), (3, 3)], device), form, device)
    case.check(ScoreRule(scale=dim**-0.5), limits)


@pytest.mark.parametrize(("dim", "value_dim", "page"), [(256, 256, 256), (24, 40, 16)])
def test_wide_heads_and_values_unlike_keys(
    dim: int, value_dim: int, page: int, device: torch.device, limits: Any
) -> None:
    form = Form(dim=dim, value_dim=value_dim, page=page, dtype=BF16)
    case = make_case(longer([(1, 70), (9, 30)], device), form, device)
    case.check(ScoreRule(scale=dim**-0.5), limits)


@pytest.mark.parametrize(
    ("heads", "rank", "rotary", "page", "dtype"),
    [
        pytest.param(20, 48, 8, 16, BF16, marks=pytest.mark.slow),
        (20, 48, 8, 64, BF16),
        (5, 64, 16, 64, FP32),
    ],
)
def test_latent_attention_equals_the_reference(
    heads: int,
    rank: int,
    rotary: int,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Any,
) -> None:
    form = Form(heads, 1, rank, rotary, latent=True, page=page, dtype=dtype)
    case = make_case(longer(MIXED, device), form, device)
    case.check(ScoreRule(scale=0.1), limits)


@pytest.mark.slow
def test_deepseek_sized_latents(device: torch.device, limits: Any) -> None:
    heads = 128 if device.type == "cuda" else 66
    form = Form(heads, 1, 512, 64, latent=True, page=64, dtype=BF16)
    case = make_case(longer([(1, 70), (1, 40), (5, 9)], device), form, device)
    if device.type != "cuda":  # programs for tokens that no sequence has cost the interpreter most
        limits = replace(limits, short_q_len=1)
    case.check(ScoreRule(scale=0.05), limits)


@pytest.mark.parametrize(("dtype", "latent"), [(BF16, False), (BF16, True), (FP32, False)])
def test_bits_of_a_row_do_not_depend_on_its_batch(
    dtype: torch.dtype, latent: bool, device: torch.device, limits: Any
) -> None:
    form = Form(8, 1, 64, 16, latent=True, dtype=dtype) if latent else Form(8, 2, dtype=dtype)
    case = make_case(longer(MIXED, device), form, device)
    rule = ScoreRule(scale=0.2)
    together = case.attend(rule, limits)
    ends = torch.tensor(case.step["q_lens"]).cumsum(0).tolist()
    for row, end in enumerate(ends):
        alone = only(case, row, case.lens[row][0])
        assert torch.equal(alone.attend(rule, limits), together[end - case.lens[row][0] : end])


def only(case: Case, row: int, q_len: int) -> Case:
    """Return the last `q_len` tokens of one sequence; what came before is in the pools."""
    end = int(case.step["cu_seqlens_q"][row + 1])
    begin, device = int(case.step["cu_seqlens_q"][row]), case.pools[0].device
    pools = [pool.clone() for pool in case.pools]
    earlier = case.step["write_at"][begin : end - q_len]
    for pool, rows in zip(pools, case.new, strict=True):
        pool.flatten(0, 1)[earlier] = rows[begin : end - q_len]
    take = slice(end - q_len, end)
    kv_len = case.lens[row][1]
    step = {
        **case.step,
        "page_table": case.step["page_table"][row : row + 1],
        "write_at": case.step["write_at"][take],
        "cu_seqlens_q": torch.tensor([0, q_len], dtype=torch.int32, device=device),
        "kv_lens": case.step["kv_lens"][row : row + 1],
        "q_lens": (q_len,),
        "kv_lens_host": (kv_len,),
    }
    queries, new = ((x[take], y[take]) for x, y in (case.queries, case.new))
    return Case(case.form, [(q_len, kv_len)], queries, (pools[0], pools[1]), step, new)


@pytest.mark.parametrize(("dtype", "window"), [(BF16, None), (FP16, 50)])
def test_bits_of_a_token_do_not_depend_on_how_its_prompt_was_cut(
    window: int | None, dtype: torch.dtype, device: torch.device, limits: Any
) -> None:
    case = make_case(longer([(33, 140)], device), Form(8, 2, dtype=dtype), device)
    rule = ScoreRule(scale=0.2, window=window, sinks=torch.ones(8, device=device))
    exact = replace(limits, exact_prompts=True)
    whole = case.attend(rule, exact)
    for q_len in (1, 4, 7):
        assert torch.equal(only(case, 0, q_len).attend(rule, exact), whole[-q_len:])


@pytest.mark.gpu
@pytest.mark.parametrize("latent", [False, True])
def test_launches_that_overlap_give_the_same_bits(latent: bool) -> None:
    """Many times, for what would be read too early is there most of the time."""
    device = torch.device("cuda")
    form = Form(8, 1, 512, 64, latent=True, page=64, dtype=BF16) if latent else Form(dtype=BF16)
    case = make_case([(1, 9000), (1, 3), (1, 2000)], form, device)
    limits, rule = paged.limits_for(device, num_seqs=8, num_units=512), ScoreRule(scale=0.2)
    assert limits.overlap
    want = case.attend(rule, replace(limits, overlap=False))
    for _ in range(50):
        assert torch.equal(case.attend(rule, limits), want)


def test_a_key_that_is_exchanged_changes_the_result(device: torch.device, limits: Any) -> None:
    case = make_case(DECODE, Form(), device)
    rule = ScoreRule(scale=0.3)
    before = case.attend(rule, limits)
    table = case.step["page_table"]
    table[2, 3] = table[2, 4]
    after = case.attend(rule, limits)
    assert (before - after)[2].abs().max() > 1e-3
    assert torch.equal(before[:2], after[:2])


def test_padding_writes_nothing(device: torch.device, limits: Any) -> None:
    """A recorded graph is wider than its batch: tokens without a slot, sequences without tokens."""
    case = make_case(DECODE, Form(), device)
    rule = ScoreRule(scale=0.3)
    want = case.attend(rule, limits)
    step = case.step
    step["write_at"] = torch.cat((step["write_at"], step["write_at"].new_full((3,), -1)))
    step["cu_seqlens_q"] = torch.cat((step["cu_seqlens_q"], step["cu_seqlens_q"][-1:].repeat(3)))
    step["kv_lens"] = torch.cat((step["kv_lens"], step["kv_lens"].new_zeros(3)))
    step["page_table"] = torch.cat((step["page_table"], step["page_table"].new_zeros(3, 14)))
    case.queries = tuple(torch.cat((x, x[:3] * NAN)) for x in case.queries)  # type: ignore[assignment]
    case.new = tuple(torch.cat((x, x[:3] * NAN)) for x in case.new)  # type: ignore[assignment]
    assert torch.equal(case.attend(rule, limits)[: len(want)], want)


def test_what_the_buffers_cannot_hold_is_refused(device: torch.device, limits: Any) -> None:
    case = make_case(DECODE, Form(), device)
    limits = replace(limits, span=64, num_units=9, num_seqs=5)
    assert case.plan(limits).has_short
    for small in (replace(limits, num_units=8), replace(limits, num_seqs=4)):
        with pytest.raises(CapacityExceeded, match="5 sequences and 9 spans"):
            case.plan(small)
    assert paged.units_of([1, 5, 0], [129, 500, 0], replace(limits, span=64)) == 3


def test_strided_rows_are_refused(device: torch.device, limits: Any) -> None:
    case = make_case(DECODE, Form(), device)
    case.queries = (case.queries[0].transpose(1, 2).contiguous().transpose(1, 2), case.queries[1])
    with pytest.raises(ShapeError, match="query"):
        case.attend(ScoreRule(scale=1.0), limits)


@pytest.mark.gpu
def test_a_recorded_graph_replays_with_other_lengths() -> None:
    device = torch.device("cuda")
    limits = paged.limits_for(device, num_seqs=8, num_units=512)
    form = Form(32, 4, 128, 128, page=64, dtype=BF16)
    rule = ScoreRule(scale=0.1)
    case = make_case([(1, 9000), (1, 700), (1, 3)], form, device)
    want = case.attend(rule, limits)
    batch, pools = case.plan(limits), [pool.clone() for pool in case.pools]
    paged.write_(*pools, *case.new, batch)
    lengths = case.step["kv_lens"].clone()
    case.step["kv_lens"].fill_(1)
    graph = torch.cuda.CUDAGraph()
    recorded = case.plan(limits)  # its units are listed anew, inside of the graph
    with torch.cuda.graph(graph):
        out = paged.paged_attention(case.queries[0], *pools, recorded, rule)
    case.step["kv_lens"].copy_(lengths)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 64, 256])
def test_large_batches(streams: int) -> None:
    device = torch.device("cuda")
    limits = paged.limits_for(device, num_seqs=256, num_units=4096)
    form = Form(32, 4, 128, 128, page=16, dtype=BF16)
    lens = [(1, 32768)] if streams == 1 else [(1, 37 + 61 * i % 2048) for i in range(streams)]
    make_case(lens, form, device).check(ScoreRule(scale=0.09), limits)
