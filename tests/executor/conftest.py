# SPDX-License-Identifier: Apache-2.0
"""A plan written by hand, so that these tests hold whatever `resolve` decides, and a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tetrarch.config.hardware import Arch, Device
from tetrarch.config.plan import (
    ExpertPlan,
    GraphPlan,
    MemoryPlan,
    ModelFacts,
    ModelPlan,
    ParallelPlan,
    Plan,
    QuantPlan,
    SchedulePlan,
    ServePlan,
    TokenBudget,
)
from tetrarch.config.support import SUPPORT, Finalize
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Phase, SampleSpec, SeqChunk, Step
from tetrarch.numerics.contract import Activations, Quantization, Recipe, SourceFormat, contract_for

FACTS = ModelFacts(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    num_layers=6,
    num_moe_layers=6,
    num_experts=8,
    top_k=2,
    hidden_size=256,
    expert_hidden_size=256,
    expert_intermediate_size=128,
    vocab_size=1024,
    context_len=64,
    num_dense_params=0,
    num_expert_params=0,
    kv_elements_per_token=1536,
    num_mtp_layers=1,
)


def _plan() -> Plan:
    contract = contract_for(Quantization.NONE)
    assert contract is not None
    route = next(row for row in SUPPORT if row.activations is Activations.BF16)
    return Plan(
        model=ModelPlan(
            path="",
            tokenizer_path="",
            served_name="test",
            dtype="float32",
            context_len=64,
            facts=FACTS,
        ),
        quant=QuantPlan(
            contract=contract,
            source=SourceFormat.BF16,
            ignored_layers=(),
            weight_recipe=Recipe(448, "mse", half_error=True),
            activation_recipe=None,
            fc2_input_scale=1 / 2688,
        ),
        parallel=ParallelPlan(tp=1, dp=1, ep=1),
        experts=ExpertPlan(
            route=route,
            finalize=Finalize.SEPARATE,
            budget=TokenBudget(per_rank=40, rows=40, term="a chunk of 32 and 8 decodes"),
            decoded_cache=False,
        ),
        spec=None,
        graphs=GraphPlan(max_decode_batch=0, max_prefill_tokens=0),
        memory=MemoryPlan(page_size=4, max_total_tokens=256, kv_bytes=None, fraction=0.5),
        schedule=SchedulePlan(
            max_running_requests=8,
            max_prefill_tokens=32,
            chunk_tokens=32,
            mixed_chunk=True,
            prefix_cache=True,
        ),
        serve=ServePlan(
            host="127.0.0.1",
            port=30000,
            api_key=None,
            admin_api_key=None,
            chat_template=None,
            log_level="info",
            incremental_streaming=False,
            allow_auto_truncate=False,
            stream_interval=1,
        ),
        device=Device(
            arch=Arch.CPU,
            name="test",
            torch_device="cpu",
            num_devices=1,
            memory_bytes=1 << 40,
            physical_cores=1,
        ),
        deterministic=False,
        num_threads=1,
        process_env=(),
        decisions=(),
    )


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Return a factory: `make_plan(memory={"page_size": 8})` replaces fields of parts."""

    def make(**parts: Any) -> Plan:
        plan = _plan()
        return replace(
            plan, **{part: replace(getattr(plan, part), **new) for part, new in parts.items()}
        )

    return make


@pytest.fixture(scope="session")
def serve() -> Callable[..., list[list[int]]]:
    """Return `serve(executor, prompts, num_new=, chunk_tokens=)` → the new tokens of each."""
    return _serve


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


_GREEDY = SampleSpec(temperature=0.0)


def _serve(
    executor: Executor, prompts: Sequence[Sequence[int]], *, num_new: int, chunk_tokens: int
) -> list[list[int]]:
    """Serve prompts the way a scheduler would: one chunk of a prompt and all decodes a step.

    Pages are handed out one by one in a shuffled order, so that no sequence's are contiguous.
    """
    size = executor.capacity.page_size
    free = list(range(executor.capacity.num_pages))
    random.Random(len(prompts)).shuffle(free)
    pages: list[list[int]] = [[] for _ in prompts]
    tokens = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)  # tokens in the pool
    while any(len(t) < len(p) + num_new for t, p in zip(tokens, prompts, strict=True)):
        seqs: list[SeqChunk] = []
        filling = False
        for row, prompt in enumerate(prompts):
            if len(tokens[row]) == len(prompt) + num_new:
                continue
            if done[row] < len(prompt):
                if filling:
                    continue
                filling = True
            end = min(len(tokens[row]), done[row] + chunk_tokens)
            while len(pages[row]) * size < end:
                pages[row].append(free.pop())
            seqs.append(
                SeqChunk(
                    row=row,
                    token_ids=tuple(tokens[row][done[row] : end]),
                    start=done[row],
                    pages=tuple(pages[row]),
                    sample=_GREEDY if end == len(tokens[row]) else None,
                )
            )
        for seq, result in zip(seqs, executor.step(_step(seqs)).seqs, strict=True):
            done[seq.row] += len(seq.token_ids)
            tokens[seq.row] += result.token_ids
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def _step(seqs: Sequence[SeqChunk]) -> Step:
    num_tokens = sum(len(seq.token_ids) for seq in seqs)
    return Step(phase=Phase.PREFILL, seqs=tuple(seqs), rank_tokens=(num_tokens,))
