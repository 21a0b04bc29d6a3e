# SPDX-License-Identifier: Apache-2.0
"""On a GPU, `--deterministic` gives a request the same bits in any company, eager and captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tetrarch.config.args import LaunchArgs
from tetrarch.config.checkpoint import read_checkpoint
from tetrarch.config.hardware import detect
from tetrarch.config.resolve import resolve
from tetrarch.core.units import ceil_div
from tetrarch.executor.executor import Executor
from tetrarch.executor.step import Phase, PromptScoring, SampleSpec, SeqChunk, Step
from tetrarch.models.describe import describe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
PROMPT, NEW, VOCAB = 60, 8, 256
COMPANY = (7, 33, 64)
Logprobs = list[tuple[int, float]]


def executor(path: Path, **settings: Any) -> Executor:
    given: dict[str, Any] = {
        "model": str(path),
        "device": "cuda",
        "dtype": "bfloat16",
        "context_length": 256,
        "max_running_requests": 64,
        "max_total_tokens": 8192,
        **settings,
    }
    args = LaunchArgs(**given)
    plan = resolve(args, read_checkpoint(args.model), describe(args.model), detect("cuda"))
    return Executor(plan)


class Run:
    """Serves sequence 0 among others, and keeps its logprobs."""

    def __init__(self, rank: Executor, size: int) -> None:
        self.rank, self.found = rank, Logprobs()
        torch.manual_seed(0)
        lens = [PROMPT, *(1 + 11 * i % 50 for i in range(1, size))]
        self.seqs = [torch.randint(3, VOCAB, (n,)).tolist() for n in lens]
        self.done = [0] * size
        each = ceil_div(PROMPT + NEW, rank.capacity.page_size)
        self.pages = [tuple(range(each * i, each * (i + 1))) for i in range(size)]

    def step(self, counts: dict[int, int], phase: Phase = Phase.PREFILL) -> None:
        chunks = [self._chunk(row, count) for row, count in counts.items()]
        step = Step(phase=phase, seqs=tuple(chunks), rank_tokens=(sum(counts.values()),))
        for chunk, result in zip(chunks, self.rank.step(step).seqs, strict=True):
            assert not result.failed
            self.done[chunk.row] += len(chunk.token_ids)
            self.seqs[chunk.row] += result.token_ids
            if chunk.row == 0:
                all_found = (*result.prompt_logprobs, *result.logprobs)
                self.found += [(one.token_id, one.logprob) for one in all_found]

    def _chunk(self, row: int, count: int) -> SeqChunk:
        tokens, start = self.seqs[row], self.done[row]
        end, targets = start + count, tokens[start + 1 : start + count + 1]
        scored = row == 0 and targets
        return SeqChunk(
            row=row,
            token_ids=tuple(tokens[start:end]),
            start=start,
            pages=self.pages[row],
            samples=(SampleSpec(temperature=0.0, top_logprobs=0),) if end == len(tokens) else (),
            scoring=PromptScoring(first=0, targets=tuple(targets)) if scored else None,
        )


def serve(rank: Executor, size: int, chunk: int = PROMPT) -> Logprobs:
    """Return the logprobs of sequence 0 among so many, its prompt cut into such chunks."""
    run = Run(rank, size)
    others = {row: len(run.seqs[row]) for row in range(1, size)}
    for start in range(0, PROMPT, chunk):
        run.step(others | {0: min(chunk, PROMPT - start)})
        others = dict.fromkeys(others, 1)
    for _ in range(NEW):
        run.step({0: 1, **others}, Phase.DECODE)
    return run.found


CASES = [
    ("demo", {"quantization": "none"}),
    ("demo", {"quantization": "nvfp4_online", "moe_activations": "per_token"}),
    ("demo", {"quantization": "nvfp4_online", "moe_activations": "bf16"}),
    ("deepseek_v3", {"quantization": "none"}),
    ("gpt_oss", {"quantization": "nvfp4_online"}),
    ("glm4_moe", {"quantization": "nvfp4_online"}),
]


@pytest.fixture
def folder(demo_path: Path, tiny_checkpoint: Callable[..., Any]) -> Callable[[str], Path]:
    """Name → a checkpoint."""
    return lambda name: demo_path if name == "demo" else tiny_checkpoint(name).path


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda case: str(case))
def test_a_requests_logprobs_do_not_know_their_company(
    folder: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    captured, eager = (
        executor(folder(name), deterministic=True, cuda_graphs=graphs, **settings)
        for graphs in ("auto", "off")
    )
    assert captured.plan.graphs.max_decode_batch
    want = serve(eager, 1)
    assert len(want) == PROMPT + NEW
    runs = {
        f"{kind}, {size} in chunks of {chunk}": serve(rank, size, chunk)
        for kind, rank in (("captured", captured), ("eager", eager))
        for size, chunk in ((1, PROMPT), (1, 1), (1, 17), *((size, 13) for size in COMPANY))
    }
    assert [run for run, found in runs.items() if found != want] == []


def test_without_it_they_do(demo_path: Path) -> None:
    """The demo model is so small that only a prompt token by token shows it."""
    rank = executor(demo_path, quantization="nvfp4_online", torch_compile="off")
    assert serve(rank, 1, 1) != serve(rank, 1)
