# SPDX-License-Identifier: Apache-2.0
"""A deterministic model gives a sequence's logits the same bits in any company, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tetrarch.attention.pool import KVPool
from tetrarch.attention.types import AttentionInputs
from tetrarch.config.plan import Plan, TokenBudget
from tetrarch.core.errors import Unsupported
from tetrarch.core.progress import NoProgress
from tetrarch.models.build import Model, build_model
from tetrarch.models.load import load_weights
from tetrarch.models.row_invariant import RowInvariant
from tetrarch.models.sources import SafetensorsSource
from tetrarch.numerics.contract import CONTRACTS, Activations, QuantContract, Quantization

PAGE, LENGTH = 4, 76
FAMILIES = [
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "minimax_m2",
]
Chunks = list[tuple[int, int]]  # (sequence, its next tokens) of one step


def tokens(count: int, seed: int, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def logits_of(model: Model, seqs: Sequence[list[int]], steps: list[Chunks]) -> Tensor:
    """Compute the steps over shuffled pages; return all logits of sequence 0, (T, V)."""
    pool = KVPool(model.sites, 1024, page_size=PAGE, dtype=model.dtype, device=model.device)
    free = torch.randperm(1024).tolist()
    pages: list[list[int]] = [[] for _ in seqs]
    done = [0] * len(seqs)
    found: list[Tensor] = []
    for step in steps:
        ids, positions, write_at = [], [], []
        for i, count in step:
            span = range(done[i], done[i] + count)
            done[i] += count
            while len(pages[i]) * PAGE < done[i]:
                pages[i].append(free.pop())
            ids += [seqs[i][p] for p in span]
            positions += span
            write_at += [pages[i][p // PAGE] * PAGE + p % PAGE for p in span]
        table = torch.zeros(len(step), max(len(pages[i]) for i, _ in step), dtype=torch.int32)
        for row, (i, _) in enumerate(step):
            table[row, : len(pages[i])] = torch.tensor(pages[i])
        q_lens = tuple(count for _, count in step)
        kv_lens = tuple(done[i] for i, _ in step)
        ends = torch.tensor((0, *q_lens)).cumsum(0)
        inputs = AttentionInputs(
            write_at=torch.tensor(write_at),
            cu_seqlens_q=ends.int(),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=table,
            q_lens=q_lens,
            kv_lens_host=kv_lens,
        )
        rows = torch.arange(len(ids))
        out = model.forward(torch.tensor(ids), torch.tensor(positions), inputs, pool, rows).logits
        found += [part for (i, _), part in zip(step, out.split(q_lens), strict=True) if i == 0]
    return torch.cat(found)


def parted(
    model: Model, *, vocab_size: int = 256, sizes: Sequence[int] = (2, 7, 33, 64)
) -> list[str]:
    """Return the names of the runs in which a sequence's logits are not those of it alone."""
    torch.manual_seed(0)
    one = tokens(LENGTH, 1, vocab_size)
    want = logits_of(model, [one], [[(0, LENGTH)]])
    assert want.isfinite().all()
    at_once, by_four = [(0, LENGTH)], [[(0, 4)]] * 10
    runs: dict[str, tuple[list[list[int]], list[Chunks]]] = {
        "token by token": ([one], [[(0, 1)]] * LENGTH),
        "in chunks of 64": ([one], [[(0, 64)], [(0, LENGTH - 64)]]),
        "four known tokens at a time": ([one], [[(0, LENGTH - 43)], *by_four, [(0, 3)]]),
        "in twos, threes and sevens": ([one], [[(0, n)] for n in (33, 2, 3, 7, 2, 3, 7, 19)]),
    }
    for size in sizes:
        lens = [1 + 11 * i % 50 for i in range(1, size)]
        seqs = [one, *(tokens(n + 8, n, vocab_size) for n in lens)]
        prompts: Chunks = [*enumerate(lens, 1)]
        decodes: Chunks = [(i, 1) for i in range(1, size)]
        runs[f"last of {size}"] = (seqs, [[*prompts, *at_once]])
        runs[f"decoding with {size}"] = (
            seqs,
            [[(0, 60), *prompts], *[[*decodes, (0, 1)]] * 4, *[[(0, 4), *decodes]] * 3],
        )
    return [
        name
        for name, (seqs, steps) in runs.items()
        if not torch.equal(got := logits_of(model, seqs, steps), want[: len(got)])
    ]


@pytest.fixture
def make(make_plan: Callable[..., Plan]) -> Callable[..., Model]:
    """Return a factory of loaded models: checkpoint folder, `deterministic`, contract → model."""

    def build(path: Path, *, deterministic: bool = True, **contract: Any) -> Model:
        budget = TokenBudget(per_rank=2048, rows=2048, term="the test's own limit")
        plan = make_plan(path, experts={"budget": budget}, **contract)
        plan = replace(plan, deterministic=deterministic)
        model = build_model(plan)
        load_weights(model, SafetensorsSource(path), plan=plan.quant, progress=NoProgress())
        return model

    return build


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in FAMILIES),
        *((family, "float32") for family in ("qwen3_moe", "deepseek_v2", "gpt_oss")),
    ],
)
def test_every_familys_logits_do_not_know_their_company(
    make: Callable[..., Model], tiny_checkpoint: Callable[..., Any], family: str, dtype: str
) -> None:
    assert parted(make(tiny_checkpoint(family).path, dtype=dtype)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_ordinary_model_fails_that_test(
    make: Callable[..., Model], tiny_checkpoint: Callable[..., Any], dtype: str
) -> None:
    assert parted(make(tiny_checkpoint("qwen3_moe").path, dtype=dtype, deterministic=False))


@pytest.mark.parametrize("count", [1, 3, 33])
@pytest.mark.parametrize(
    "part",
    [
        "model.layers.1.input_layernorm",
        "model.layers.1.self_attn",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.experts",
        "model.norm",
        "lm_head",
    ],
)
def test_one_part_that_is_a_millionth_off_in_one_company_is_noticed(
    make: Callable[..., Model], tiny_checkpoint: Callable[..., Any], part: str, count: int
) -> None:
    """8 units in the last place of FP32, in forwards of so many rows only."""

    def off(_module: nn.Module, _arguments: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(off(_module, _arguments, one) for one in output)
        if output is None or output.dtype != torch.float32:
            return output
        return output * (1 + 2**-20) if output.flatten(0, -2).shape[0] == count else output

    model = make(tiny_checkpoint("qwen3_moe", num_hidden_layers=2).path)
    model.hf.get_submodule(part).register_forward_hook(off)
    assert parted(model, sizes=())


@pytest.mark.parametrize(
    "contract",
    [c for c in CONTRACTS if c.quantization is not Quantization.MODELOPT_FP4],
    ids=lambda contract: contract.name,
)
def test_nor_do_those_of_the_demo_model(
    make: Callable[..., Model], demo_path: Path, contract: QuantContract
) -> None:
    model = make(
        demo_path,
        dtype="bfloat16",
        quantization=contract.quantization,
        activations=contract.activations,
    )
    assert parted(model, vocab_size=1024) == []


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("decoded_cache", [False, True])
def test_nor_those_of_a_serialized_nvfp4_checkpoint(
    make: Callable[..., Model], lab: Any, activations: Activations, decoded_cache: bool
) -> None:
    path, _ = lab.store(lab.ragged("qwen3_moe"), "nvfp4_modelopt", lab.experts)
    model = make(
        path,
        dtype="bfloat16",
        quantization=Quantization.MODELOPT_FP4,
        activations=activations,
        decoded_cache=decoded_cache,
    )
    assert parted(model) == []


def test_it_computes_what_an_ordinary_model_computes(
    make: Callable[..., Model], tiny_checkpoint: Callable[..., Any]
) -> None:
    """Up to rounding: FP32 logits of 0.2, an addition of which is off by 1.5e-8 at most."""
    for family in FAMILIES:
        path = tiny_checkpoint(family).path
        got, want = (
            logits_of(make(path, deterministic=fixed), [tokens(LENGTH, 1)], [[(0, LENGTH)]])
            for fixed in (True, False)
        )
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("einsum", lambda x: torch.einsum("tk,uk->tu", x, x)),
        ("bmm", lambda x: torch.bmm(x[None], x[None])),
        ("two batches", lambda x: x[None] @ x[None]),
        ("scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x, x, x)),
        ("softplus", F.softplus),
        ("sigmoid_", lambda x: x.clone().sigmoid_()),
        ("power 3", lambda x: x**3),
        ("sum", lambda x: x.sum()),
        ("mean", lambda x: x.mean(0)),
        ("softmax", lambda x: F.softmax(x, dim=0)),
        ("conv1d", lambda x: F.conv1d(x[None], x[None])),
    ],
)
def test_what_is_not_known_to_treat_rows_alike_is_refused(
    name: str, call: Callable[[Tensor], object]
) -> None:
    values = torch.randn(4, 4)
    call(values)
    with RowInvariant(), pytest.raises(Unsupported) as caught:
        call(values)
    assert name in caught.value.what
    call(values)


def test_a_layer_that_calls_torch_in_any_way_is_reached() -> None:
    linear, rows = nn.Linear(48, 80), torch.randn(33, 48)
    ways: list[Callable[[Tensor], Tensor]] = [
        linear,
        lambda x: F.linear(x, linear.weight, linear.bias),
        lambda x: F.linear(x[None], linear.weight)[0],
        lambda x: x @ linear.weight.mT,
        lambda x: torch.matmul(x, linear.weight.mT),
        lambda x: torch.mm(x, linear.weight.mT),
        nn.Sequential(linear, nn.SiLU()),
        lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: x[:, :1] @ linear.weight[:1, :6],  # an outer product
    ]
    counts = (1, 2, 3, 4, 7, 33)
    for way in ways:
        with RowInvariant(), torch.no_grad():
            whole, *parts = [way(rows[-count:]) for count in reversed(counts)]
        assert all(torch.equal(part, whole[-len(part) :]) for part in parts)
        torch.testing.assert_close(whole, way(rows), atol=1e-5, rtol=1e-5)
